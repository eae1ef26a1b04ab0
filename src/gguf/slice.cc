#include "gguf/slice.h"

#include <algorithm>
#include <format>

#include "base/check.h"
#include "base/hex.h"
#include "gguf/header_builder.h"
#include "gguf/slice_format.h"

namespace kvasir::gguf {
namespace {

// What a slice keeps of the model's metadata: everything of the architecture and of
// general.* that is small. Vocabularies, templates and licence texts are not.
constexpr std::uint64_t kMaxKeptValueBytes = 4096;

bool is_kept(const KeyValue& kv, std::string_view architecture) {
  if (kv.data_bytes > kMaxKeptValueBytes || kv.key == GGUF_KEY_GENERAL_ALIGNMENT) return false;
  const std::string_view key = kv.key;
  const bool of_architecture = key.starts_with(architecture) && key.substr(architecture.size()).starts_with('.');
  return of_architecture || (key.starts_with("general.") && kv.type != GGUF_TYPE_ARRAY);
}

}  // namespace

Result<SliceLayout> SliceLayout::make(const MoeModel& model, const SlicePlan& plan) {
  KVASIR_TRY(model.require_expert_data());
  SliceLayout layout;
  layout.model_ = &model;
  const GgufFile& metadata = model.files().metadata();
  for (const KeyValue& kv : metadata.key_values()) {
    if (!is_kept(kv, model.architecture())) continue;
    KVASIR_ASSIGN(Bytes raw, metadata.get_raw_value(kv));
    layout.copied_metadata_.emplace_back(kv.key, std::move(raw));
  }
  for (const LayerExperts& layer : model.layers()) {
    const auto wanted = plan.layers.find(layer.layer);
    if (wanted == plan.layers.end()) continue;
    KVASIR_TRY(layout.add_group(layer, experts_of_group(model, layer, wanted->second)));
  }
  if (layout.groups_.empty())
    return fix_input(std::format("the plan keeps no expert of '{}'; name layers and experts that it has.",
                                 model.file_name()));

  // The size of the header does not depend on the hashes, so a first one with zeros tells it;
  // it also tells how the data section is laid out.
  const std::vector<Hash> no_hashes(layout.n_slabs_);
  layout.header_bytes_ = layout.header(no_hashes).size();
  HeaderBuilder offsets;
  for (SliceTensor& tensor : layout.tensors_)
    tensor.offset = layout.header_bytes_ + offsets.add_tensor(tensor.source->name, tensor.source->type, tensor.ne);
  layout.total_bytes_ = layout.header_bytes_ + offsets.data_bytes();

  for (const Group& group : layout.groups_) {
    for (std::size_t i = 0; i < group.n_tensors; ++i) {
      const SliceTensor& tensor = layout.tensors_[group.first_tensor + i];
      if (!tensor.source->per_expert) {
        layout.runs_.push_back({tensor.source->file, tensor.source->offset, tensor.offset, tensor.nbytes});
        continue;
      }
      std::uint64_t offset = tensor.offset;
      for (const Range& range : group.kept.ranges()) {
        // A range of ids is one range of slabs too: what is kept is held, and held ids of one
        // range lie side by side in the file.
        const auto first = group.layer->held.rank(range.begin);
        KVASIR_CHECK(first && group.layer->held.contains(range.end - 1));
        const std::uint64_t size = (range.end - range.begin) * tensor.slab_bytes;
        layout.runs_.push_back({tensor.source->file, tensor.source->offset + *first * tensor.slab_bytes, offset, size});
        offset += size;
      }
    }
  }
  return layout;
}

Status SliceLayout::add_group(const LayerExperts& layer, const ExpertSet& kept) {
  for (std::uint32_t id : kept.ids())
    if (!layer.held.contains(id))
      return fix_input(std::format("'{}' does not hold expert {} of layer {} ({}); cut from a file that does.",
                                   model_->file_name(), id, layer.layer, to_string(layer.group)));
  Group group;
  group.layer = &layer;
  group.kept = kept;
  KVASIR_ASSIGN(group.id, model_->layer_id(layer));
  group.first_tensor = tensors_.size();
  group.n_tensors = layer.tensors.size();
  for (const ExpertTensor& source : layer.tensors) {
    SliceTensor tensor;
    tensor.source = &source;
    tensor.ne = source.ne;
    tensor.slab_bytes = source.bytes_per_expert;
    tensor.n_slabs = 1;
    if (source.per_expert) {
      tensor.n_slabs = kept.size();
      tensor.ne[stacked_dimension(source.id.part)] = kept.size();
    }
    tensor.nbytes = tensor.n_slabs * tensor.slab_bytes;
    n_slabs_ += tensor.n_slabs;
    tensors_.push_back(tensor);
  }
  groups_.push_back(std::move(group));
  return {};
}

Bytes SliceLayout::header(std::span<const Hash> slab_hashes) const {
  KVASIR_CHECK(slab_hashes.size() == n_slabs_);
  HeaderBuilder out;
  for (const auto& [key, raw] : copied_metadata_) out.add_raw(key, raw);
  out.add_u32(kSliceVersionKey, kSliceVersion);
  out.add_string(kSliceModelNameKey, model_->model_name());
  out.add_u32(kSliceEmbdKey, model_->n_embd());

  std::vector<std::uint32_t> layer_numbers;
  std::uint32_t expert_begin = UINT32_MAX, expert_end = 0;
  for (const Group& group : groups_) {
    if (layer_numbers.empty() || layer_numbers.back() != group.layer->layer)
      layer_numbers.push_back(group.layer->layer);
    expert_begin = std::min(expert_begin, group.kept.ranges().front().begin);
    expert_end = std::max(expert_end, group.kept.end());
  }
  out.add_u32_array(kSliceLayersKey, layer_numbers);
  out.add_u32(kOldLayerBeginKey, layer_numbers.front());
  out.add_u32(kOldLayerEndKey, layer_numbers.back() + 1);
  out.add_u32(kOldExpertBeginKey, expert_begin);
  out.add_u32(kOldExpertEndKey, expert_end);

  for (const Group& group : groups_) {
    const std::uint32_t layer = group.layer->layer;
    out.add_u32_array(slice_experts_key(layer, group.layer->group), group.kept.ids());
    out.add_u32(slice_expert_count_key(layer, group.layer->group), group.layer->n_expert);
    out.add_string(slice_layer_id_key(layer, group.layer->group), to_hex(group.id));
  }
  std::size_t slab = 0;
  for (const SliceTensor& tensor : tensors_) {
    std::vector<std::string> texts;
    texts.reserve(tensor.n_slabs);
    for (std::uint32_t i = 0; i < tensor.n_slabs; ++i) texts.push_back(to_hex(slab_hashes[slab++]));
    out.add_string_array(slice_hashes_key(tensor.source->name), texts);
  }
  for (const SliceTensor& tensor : tensors_) out.add_tensor(tensor.source->name, tensor.source->type, tensor.ne);
  return out.header();
}

}  // namespace kvasir::gguf
