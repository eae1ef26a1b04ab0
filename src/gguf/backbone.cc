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

}  // namespace

Result<BackboneLayout> BackboneLayout::make(const MoeModel& model) {
  KVASIR_TRY(model.require_expert_data());
  if (model.kind() != FileKind::kModel)
    return fix_input(std::format("'{}' is a {}, which has no dense weights; give the whole model.", model.file_name(),
                                 to_string(model.kind())));
  BackboneLayout layout;
  HeaderBuilder header;
  KVASIR_TRY(add_metadata(model, header));
  std::map<std::string_view, LayerId> ids;  // by weight
  for (const LayerExperts& layer : model.layers()) {
    KVASIR_ASSIGN(const LayerId id, model.layer_id(layer));
    header.add_string(backbone_layer_id_key(layer.layer, layer.group), to_hex(id));
    for (const ExpertTensor& tensor : layer.tensors)
      if (tensor.id.part == ExpertPart::kWeight) ids.emplace(tensor.name, id);
  }

  std::vector<std::string> names;
  std::vector<std::uint32_t> types;
  for (const auto& [file, tensor] : model.files().tensors()) {
    const auto id = ids.find(tensor->name);
    if (id == ids.end()) {
      const std::uint64_t offset = header.add_tensor(tensor->name, tensor->type, tensor->ne);
      layout.runs.push_back({file, tensor->offset, offset, tensor->nbytes});
      continue;
    }
    const auto type = placeholder_type(tensor->ne);
    if (!type)
      return fix_input(std::format("'{}' is too small to be left out of a backbone file; use the whole model.",
                                   tensor->name));
    const std::uint64_t offset = header.add_tensor(tensor->name, *type, tensor->ne);
    layout.stamps.push_back({offset, encode_placeholder({tensor->type, id->second, tensor->nbytes})});
    names.push_back(tensor->name);
    types.push_back(static_cast<std::uint32_t>(tensor->type));
  }
  header.add_string_array(kBackboneTensorsKey, names);
  header.add_u32_array(kBackboneTypesKey, types);
  // Until here offsets are relative to the data section, which begins where the header ends.
  layout.header = header.header();
  for (CopyRun& run : layout.runs) run.offset += layout.header.size();
  for (Stamp& stamp : layout.stamps) stamp.offset += layout.header.size();
  layout.total_bytes = layout.header.size() + header.data_bytes();
  return layout;
}

Status write_backbone(const MoeModel& model, const std::string& path, const Progress& progress) {
  KVASIR_ASSIGN(const BackboneLayout layout, BackboneLayout::make(model));
  KVASIR_TRY(check_not_input(model.files(), path));
  KVASIR_ASSIGN(OutputFile out, OutputFile::create(path));
  KVASIR_TRY(out.set_size(layout.total_bytes));
  KVASIR_TRY(out.write_at(0, layout.header));
  for (const BackboneLayout::Stamp& stamp : layout.stamps) KVASIR_TRY(out.write_at(stamp.offset, stamp.bytes));
  KVASIR_TRY(copy_runs(model.files(), layout.runs, out, progress));
  return out.commit();
}

}  // namespace kvasir::gguf
