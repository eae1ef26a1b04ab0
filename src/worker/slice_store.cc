#include "worker/slice_store.h"

#include <algorithm>
#include <cstring>
#include <format>
#include <tuple>

#include "base/check.h"
#include "ffn/device.h"
#include "worker/slice_loader.h"

namespace kvasir::worker {
namespace {

std::string mib(std::uint64_t bytes) { return std::format("{:.1f} MiB", static_cast<double>(bytes) / 1048576.0); }

Status plan_file(const gguf::MoeModel& model, const StoreOptions& options, std::vector<LayerPlan>& plans) {
  KVASIR_TRY(model.require_expert_data());
  bool any = false;
  for (const gguf::LayerExperts& layer : model.layers()) {
    if (layer.held.empty() || (options.only_layer && layer.layer != *options.only_layer)) continue;
    any = true;
    KVASIR_ASSIGN(const wire::LayerId id, model.layer_id(layer));
    const auto same = std::ranges::find(plans, id, &LayerPlan::id);
    if (same != plans.end()) {
      KVASIR_TRY(same->join(model, layer));
    } else {
      if (plans.size() >= wire::kHoldingsMax)
        return fix_input(std::format("One worker serves at most {} layers: give the rest to another.",
                                     wire::kHoldingsMax));
      plans.emplace_back(model, layer, id);
    }
  }
  if (!any && options.only_layer)
    return fix_input(std::format("{} holds no experts of layer {}.", model.file_name(), *options.only_layer));
  return {};
}

}  // namespace

Result<SliceStore> SliceStore::load(std::span<const std::string> files, const StoreOptions& options) {
  KVASIR_ASSIGN(ggml_backend_dev_t device, ffn::find_device(options.device));
  ggml_backend_buffer_type_t buffer_type = ggml_backend_dev_buffer_type(device);

  std::vector<std::unique_ptr<gguf::MoeModel>> models;  // stay put: plans point into them
  std::vector<LayerPlan> plans;
  for (const std::string& file : files) {
    KVASIR_ASSIGN(gguf::MoeModel model, gguf::MoeModel::open(file));
    models.push_back(std::make_unique<gguf::MoeModel>(std::move(model)));
    KVASIR_TRY(plan_file(*models.back(), options, plans));
  }

  SliceStore store;
  const auto lay_out = [&](Packing packing) -> Status {
    store.bytes_ = store.packed_bytes_ = 0;
    for (LayerPlan& plan : plans) {
      KVASIR_ASSIGN(const std::uint64_t bytes, plan.lay_out(buffer_type, packing, device));
      store.bytes_ += bytes;
      store.packed_bytes_ += plan.packed_bytes();
    }
    return {};
  };
  KVASIR_TRY(lay_out(options.packing));
  if (options.packing == Packing::kBeside && store.packed_bytes_ != 0 && store.bytes_ > options.bytes_max)
    KVASIR_TRY(lay_out(Packing::kNone));
  if (options.bytes_max != 0 && store.bytes_ > options.bytes_max)
    return fix_input(std::format("The experts need {}, but {} are allowed: leave out a slice or allow more memory.",
                                 mib(store.bytes_), mib(options.bytes_max)));
  for (LayerPlan& plan : plans) {
    KVASIR_ASSIGN(HeldLayerPtr layer, plan.load(buffer_type, options.verify));
    store.plain_ &= layer->plain;
    store.layers_.push_back(std::move(layer));
  }
  std::ranges::sort(store.layers_, [](const HeldLayerPtr& a, const HeldLayerPtr& b) {
    return std::tie(a->layer, a->group, a->layer_id) < std::tie(b->layer, b->group, b->layer_id);
  });
  return store;
}

HeldLayerPtr SliceStore::find(const wire::LayerId& layer_id) const {
  const auto found = std::ranges::find(layers_, layer_id, &HeldLayer::layer_id);
  return found == layers_.end() ? nullptr : *found;
}

wire::Holdings SliceStore::holdings() const {
  wire::Holdings holdings;
  for (const HeldLayerPtr& layer : layers_)
    holdings.entries.push_back({layer->layer_id, layer->layer, layer->group, layer->n_expert, layer->n_embd,
                                layer->experts});
  return holdings;
}

std::optional<wire::Recipe> plain_swiglu_recipe(const HeldLayer& layer) {
  const ffn::ExpertTensors& t = layer.tensors;
  if (t.gate_bias || t.up_bias || t.gate_up_bias || t.down_bias) return std::nullopt;
  wire::Recipe recipe;
  recipe.group = layer.group;
  recipe.gate_layout = t.gate_up ? wire::GateLayout::kMerged : wire::GateLayout::kSplit;
  recipe.gate_scale = t.gate_scale != nullptr;
  recipe.up_scale = (t.gate_up ? t.gate_up_scale : t.up_scale) != nullptr;
  recipe.down_scale = t.down_scale != nullptr;
  recipe.n_embd = layer.n_embd;
  recipe.n_ff = static_cast<std::uint32_t>(t.down->ne[0]);
  recipe.n_expert = layer.n_expert;
  if (!ffn::Engine::check(recipe, t)) return std::nullopt;
  return recipe;
}

}  // namespace kvasir::worker
