#include "gguf/backbone.h"

#include <format>
#include <map>
#include <vector>

#include "base/hex.h"
#include "gguf/header_builder.h"
#include "gguf/output_file.h"
#include "gguf/placeholder.h"
#include "gguf/slice_format.h"

namespace kvasir::gguf {
namespace {

struct Stamp {
  std::uint64_t offset = 0;  // in the data section
  Placeholder placeholder;
};

// What becomes of each tensor, in the model's order.
struct Plan {
  HeaderBuilder header;
  std::vector<CopyRun> runs;  // offsets relative to the data section
  std::vector<Stamp> stamps;
};

Status add_metadata(const MoeModel& model, HeaderBuilder& header) {
  const GgufFile& file = model.files().metadata();
  for (const KeyValue& kv : file.key_values()) {
    // The backbone is one file, aligned as usual.
    if (kv.key == GGUF_KEY_GENERAL_ALIGNMENT || kv.key.starts_with("split.")) continue;
    KVASIR_ASSIGN(const Bytes raw, file.get_raw_value(kv));
    header.add_raw(kv.key, raw);
  }
  header.add_u32(kBackboneVersionKey, kBackboneVersion);
  return {};
}

Result<Plan> make_plan(const MoeModel& model) {
  Plan plan;
  KVASIR_TRY(add_metadata(model, plan.header));
  std::map<std::string_view, LayerId> ids;  // by weight
  for (const LayerExperts& layer : model.layers()) {
    KVASIR_ASSIGN(const LayerId id, model.layer_id(layer));
    plan.header.add_string(backbone_layer_id_key(layer.layer, layer.group), to_hex(id));
    for (const ExpertTensor& tensor : layer.tensors)
      if (tensor.id.part == ExpertPart::kWeight) ids.emplace(tensor.name, id);
  }

  std::vector<std::string> names;
  std::vector<std::uint32_t> types;
  for (const auto& [file, tensor] : model.files().tensors()) {
    const auto id = ids.find(tensor->name);
    if (id == ids.end()) {
      const std::uint64_t offset = plan.header.add_tensor(tensor->name, tensor->type, tensor->ne);
      plan.runs.push_back({file, tensor->offset, offset, tensor->nbytes});
      continue;
    }
    const auto type = placeholder_type(tensor->ne);
    if (!type)
      return fix_input(std::format("'{}' is too small to be left out of a backbone file; use the whole model.",
                                   tensor->name));
    const std::uint64_t offset = plan.header.add_tensor(tensor->name, *type, tensor->ne);
    plan.stamps.push_back({offset, {tensor->type, id->second, tensor->nbytes}});
    names.push_back(tensor->name);
    types.push_back(static_cast<std::uint32_t>(tensor->type));
  }
  plan.header.add_string_array(kBackboneTensorsKey, names);
  plan.header.add_u32_array(kBackboneTypesKey, types);
  return plan;
}

}  // namespace

Status write_backbone(const MoeModel& model, const std::string& path, const Progress& progress) {
  KVASIR_TRY(model.require_expert_data());
  if (model.kind() != FileKind::kModel)
    return fix_input(std::format("'{}' is a {}, which has no dense weights; give the whole model.", model.file_name(),
                                 to_string(model.kind())));
  KVASIR_TRY(check_not_input(model.files(), path));
  KVASIR_ASSIGN(Plan plan, make_plan(model));
  KVASIR_ASSIGN(OutputFile out, OutputFile::create(path));

  const Bytes header = plan.header.header();
  KVASIR_TRY(out.set_size(header.size() + plan.header.data_bytes()));
  KVASIR_TRY(out.write_at(0, header));
  for (const Stamp& stamp : plan.stamps)
    KVASIR_TRY(out.write_at(header.size() + stamp.offset, encode_placeholder(stamp.placeholder)));
  for (CopyRun& run : plan.runs) run.offset += header.size();
  KVASIR_TRY(copy_runs(model.files(), plan.runs, out, progress));
  return out.commit();
}

}  // namespace kvasir::gguf
