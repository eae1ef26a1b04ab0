#include "gguf/slice_plan.h"

#include <format>
#include <nlohmann/json.hpp>

namespace kvasir::gguf {
namespace {

using nlohmann::json;

// The group whose ids a plan names: exps, or chexps where the layer has nothing else.
const LayerExperts* leading_group(const MoeModel& model, std::uint32_t layer) {
  const LayerExperts* exps = model.find(layer, ExpertGroup::kExps);
  return exps ? exps : model.find(layer, ExpertGroup::kChexps);
}

Result<const LayerExperts*> layer_with_experts(const MoeModel& model, std::uint32_t layer) {
  const LayerExperts* found = leading_group(model, layer);
  if (!found)
    return fix_input(std::format("layer {} of '{}' has no routed experts; see which do with 'kvasir inspect'.", layer,
                                 model.file_name()));
  return found;
}

// A slice of a slice can keep only what is there.
Status check_held(const MoeModel& model, const LayerExperts& layer, const ExpertSet& set) {
  for (std::uint32_t id : set.ids())
    if (!layer.held.contains(id))
      return fix_input(std::format("'{}' does not hold expert {} of layer {} (it holds {}); cut from a file that does.",
                                   model.file_name(), id, layer.layer, format_ranges(layer.held)));
  return {};
}

std::uint32_t layer_limit(const MoeModel& model) {
  std::uint32_t limit = model.n_layer();
  for (const LayerExperts& layer : model.layers()) limit = std::max(limit, layer.layer + 1);
  return limit;
}

std::unexpected<Error> bad_plan(std::string_view what) {
  return fix_input(std::format("the plan is not of the form {{\"layers\": {{\"0\": [[0,16],[20,21]], …}}}}: {}.",
                               what));
}

}  // namespace

Result<SlicePlan> SlicePlan::from_ranges(const MoeModel& model, std::string_view layers, std::string_view experts) {
  KVASIR_TRY(model.require_expert_data());
  const bool all_layers = layers == ":" || layers == "all";
  KVASIR_ASSIGN(const ExpertSet layer_set, parse_ranges(layers, layer_limit(model), "layer"));
  SlicePlan plan;
  for (std::uint32_t number : layer_set.ids()) {
    if (all_layers && !leading_group(model, number)) continue;
    KVASIR_ASSIGN(const LayerExperts* layer, layer_with_experts(model, number));
    ExpertSet set = layer->held;
    if (experts != ":" && experts != "all") {
      KVASIR_ASSIGN(set, parse_ranges(experts, layer->n_expert, "expert"));
      KVASIR_TRY(check_held(model, *layer, set));
    }
    plan.layers.emplace(number, std::move(set));
  }
  return plan;
}

Result<SlicePlan> SlicePlan::from_json(const MoeModel& model, std::string_view text) {
  KVASIR_TRY(model.require_expert_data());
  if (text.size() > kMaxPlanBytes) return bad_plan(std::format("it is larger than {} bytes", kMaxPlanBytes));
  const json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded()) return bad_plan("it is not JSON");
  if (!root.is_object() || root.size() != 1 || !root.contains("layers") || !root["layers"].is_object())
    return bad_plan("it needs one member, \"layers\", an object");
  if (root["layers"].empty()) return bad_plan("it names no layer");

  SlicePlan plan;
  for (const auto& [name, ranges] : root["layers"].items()) {
    KVASIR_ASSIGN(const ExpertSet number, parse_ranges(name, layer_limit(model), "layer"));
    if (number.size() != 1) return bad_plan(std::format("'{}' is not one layer's number", name));
    const std::uint32_t layer_number = number.ranges().front().begin;
    KVASIR_ASSIGN(const LayerExperts* layer, layer_with_experts(model, layer_number));
    if (!ranges.is_array() || ranges.empty()) return bad_plan(std::format("layer {} needs a list of ranges", name));
    ExpertSet set;
    for (const json& range : ranges) {
      if (!range.is_array() || range.size() != 2 || !range[0].is_number_unsigned() || !range[1].is_number_unsigned())
        return bad_plan(std::format("a range of layer {} is not a pair [begin, end) of numbers", name));
      const auto begin = range[0].get<std::uint64_t>(), end = range[1].get<std::uint64_t>();
      if (begin >= end)
        return fix_input(std::format("the range [{},{}] of layer {} is empty; write [a,b] with a < b (b is not "
                                     "included).", begin, end, name));
      if (end > layer->n_expert)
        return fix_input(std::format("expert {} of layer {} does not exist; this layer has experts 0:{}.", end - 1,
                                     name, layer->n_expert));
      set.add({static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(end)});
    }
    KVASIR_TRY(check_held(model, *layer, set));
    if (!plan.layers.emplace(layer_number, std::move(set)).second)
      return bad_plan(std::format("layer {} occurs twice", name));
  }
  return plan;
}

std::string SlicePlan::to_json() const {
  json root = {{"layers", json::object()}};
  for (const auto& [layer, set] : layers) {
    json& ranges = root["layers"][std::to_string(layer)] = json::array();
    for (const Range& range : set.ranges()) ranges.push_back({range.begin, range.end});
  }
  return root.dump();
}

ExpertSet experts_of_group(const MoeModel& model, const LayerExperts& layer, const ExpertSet& set) {
  const LayerExperts* leading = leading_group(model, layer.layer);
  if (leading == &layer || leading->n_expert == layer.n_expert) return set;
  std::vector<std::uint32_t> ids;
  for (std::uint64_t id : set.ids()) ids.push_back(static_cast<std::uint32_t>(id * layer.n_expert / leading->n_expert));
  return ExpertSet::from_ids(std::move(ids));
}

}  // namespace kvasir::gguf
