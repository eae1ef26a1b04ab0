// kvasir inspect: what a model, slice or backbone file holds.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <format>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "base/hex.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "gguf/http_source.h"
#include "gguf/moe_model.h"

namespace kvasir::cli {
namespace {

using gguf::ExpertPart;
using gguf::ExpertRole;
using gguf::LayerExperts;
using gguf::MoeModel;

std::uint64_t held_bytes(const LayerExperts& layer) {
  std::uint64_t total = 0;
  for (const gguf::ExpertTensor& tensor : layer.tensors) total += slab_count(layer, tensor) * tensor.bytes_per_expert;
  return total;
}

// "Q4_K Q4_K Q6_K", gate, up, down; a merged gate and up counts as one.
std::string weight_types(const LayerExperts& layer) {
  std::string out;
  for (ExpertRole role : {ExpertRole::kGate, ExpertRole::kUp, ExpertRole::kGateUp, ExpertRole::kDown}) {
    const gguf::ExpertTensor* weight = layer.find(role, ExpertPart::kWeight);
    if (weight) out += std::format("{}{} {}", out.empty() ? "" : ", ", to_string(role), ggml_type_name(weight->type));
  }
  return out;
}

std::string side_parts(const LayerExperts& layer) {
  std::set<std::string_view> parts;
  for (const gguf::ExpertTensor& tensor : layer.tensors)
    if (tensor.id.part != ExpertPart::kWeight) parts.insert(to_string(tensor.id.part));
  std::string out;
  for (std::string_view part : parts) out += std::format(" +{}", part);
  return out;
}

// One line of the table: consecutive layers that are alike.
struct Row {
  std::uint32_t begin = 0, end = 0;
  std::string group, n_expert, held, types, expert_bytes;
  std::uint64_t bytes = 0;
  auto key() const { return std::tie(group, n_expert, held, types, expert_bytes); }
};

std::vector<Row> make_rows(const MoeModel& model) {
  std::vector<Row> rows;
  for (const LayerExperts& layer : model.layers()) {
    Row row{layer.layer, layer.layer + 1, std::string(to_string(layer.group)), std::to_string(layer.n_expert),
            layer.held.empty() ? "none" : format_ranges(layer.held), weight_types(layer) + side_parts(layer),
            format_bytes(layer.bytes_per_expert()), held_bytes(layer)};
    const auto last = std::find_if(rows.rbegin(), rows.rend(), [&](const Row& r) { return r.group == row.group; });
    if (last != rows.rend() && last->end == row.begin && last->key() == row.key()) {
      ++last->end;
      last->bytes += row.bytes;
    } else {
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

void print_table(const MoeModel& model) {
  const std::uint64_t file_bytes = model.files().total_bytes();
  const std::string head = std::format("{}: {} '{}' ({}), {} tensors, {}", model.file_name(), to_string(model.kind()),
                                 model.model_name(), model.architecture(), model.files().tensors().size(),
                                 format_bytes(file_bytes));
  std::printf("%s", head.c_str());
  if (model.files().files().size() > 1) std::printf(" in %zu parts", model.files().files().size());
  std::printf("\n%u layers, n_embd %u", model.n_layer(), model.n_embd());
  if (model.layers().empty()) {
    std::printf("; dense: no routed experts\n");
    return;
  }
  std::printf(", %u experts", model.n_expert());
  if (model.n_expert_used() > 0) std::printf(", top-%u", model.n_expert_used());
  std::printf("\n\n%-10s %-7s %7s  %-20s %12s %10s  %s\n", "layers", "group", "experts", "held", "bytes/expert",
              "here", "types");
  std::uint64_t expert_bytes = 0;
  for (const Row& row : make_rows(model)) {
    const bool is_one = row.end - row.begin == 1;
    const std::string layers = is_one ? std::to_string(row.begin) : std::format("{}:{}", row.begin, row.end);
    const std::string here = model.kind() == gguf::FileKind::kBackbone ? "-" : format_bytes(row.bytes);
    std::printf("%-10s %-7s %7s  %-20s %12s %10s  %s\n", layers.c_str(), row.group.c_str(), row.n_expert.c_str(),
                row.held.c_str(), row.expert_bytes.c_str(), here.c_str(), row.types.c_str());
    expert_bytes += row.bytes;
  }
  if (model.kind() != gguf::FileKind::kBackbone)
    std::printf("\nexperts: %s of %s (%.1f %%)\n", format_bytes(expert_bytes).c_str(), format_bytes(file_bytes).c_str(),
                100.0 * static_cast<double>(expert_bytes) / static_cast<double>(file_bytes));
}

Result<nlohmann::json> to_json(const MoeModel& model) {
  using nlohmann::json;
  json root = {{"file", model.file_name()},
               {"kind", to_string(model.kind())},
               {"architecture", model.architecture()},
               {"name", model.model_name()},
               {"n_layer", model.n_layer()},
               {"n_expert", model.n_expert()},
               {"n_expert_used", model.n_expert_used()},
               {"n_embd", model.n_embd()},
               {"n_parts", model.files().files().size()},
               {"n_tensors", model.files().tensors().size()},
               {"bytes", model.files().total_bytes()},
               {"layers", json::array()}};
  std::uint64_t expert_bytes = 0;
  for (const LayerExperts& layer : model.layers()) {
    KVASIR_ASSIGN(const gguf::LayerId id, model.layer_id(layer));
    json held = json::array(), tensors = json::array();
    for (const Range& range : layer.held.ranges()) held.push_back({range.begin, range.end});
    for (const gguf::ExpertTensor& tensor : layer.tensors)
      tensors.push_back({{"name", tensor.name},
                         {"type", ggml_type_name(tensor.type)},
                         {"shape", tensor.ne},
                         {"per_expert", tensor.per_expert},
                         {"bytes_per_expert", tensor.bytes_per_expert}});
    root["layers"].push_back({{"layer", layer.layer},
                              {"group", to_string(layer.group)},
                              {"n_expert", layer.n_expert},
                              {"held", held},
                              {"layer_id", to_hex(id)},
                              {"bytes_per_expert", layer.bytes_per_expert()},
                              {"tensors", tensors}});
    if (model.kind() != gguf::FileKind::kBackbone) expert_bytes += held_bytes(layer);
  }
  root["expert_bytes"] = expert_bytes;
  return root;
}

Status run(const std::string& path, bool as_json) {
  KVASIR_ASSIGN(const MoeModel model, MoeModel::open(path, gguf::open_any_source));
  if (!as_json) {
    print_table(model);
    return {};
  }
  KVASIR_ASSIGN(const nlohmann::json root, to_json(model));
  // Names come from the file and need not be UTF-8.
  std::printf("%s\n", root.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  return {};
}

}  // namespace

void add_inspect(CLI::App& app, int& exit_code) {
  struct Options {
    std::string path;
    bool json = false;
  };
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("inspect", "Print what a model, slice or backbone file holds");
  command->add_option("file", options->path, "GGUF file; any part of a split set; http(s) URL")->required();
  command->add_flag("--json", options->json, "machine-readable, with layer ids");
  command->callback([options, &exit_code] { exit_code = report(run(options->path, options->json)); });
}

}  // namespace kvasir::cli
