#include "gguf/memory_slice.h"

#include <algorithm>
#include <cstring>
#include <format>
#include <vector>

#include "base/hex.h"
#include "base/math.h"
#include "gguf/blake3_hasher.h"
#include "gguf/header_builder.h"
#include "gguf/moe_model.h"
#include "gguf/slice_format.h"

namespace kvasir::gguf {
namespace {

// The file says nothing of the model beyond the layer; readers want a name here.
constexpr std::string_view kArchitecture = "kvasir-layer";
// Header keys other than those of each expert and tensor.
constexpr std::uint64_t kFixedBytes = 1024;
// Keys, shapes and padding of one tensor, its name (at most kMaxTensorNameBytes) twice among them.
constexpr std::uint64_t kFixedTensorBytes = 512;
// Of one slab's hash: 64 digits and their length.
constexpr std::uint64_t kHashTextBytes = 72;

struct Slabs {
  const MemoryTensor* tensor = nullptr;
  ExpertTensorName name;
  Shape ne{};  // in the model
  std::uint64_t slab_bytes = 0;
};

Result<std::vector<Slabs>> check_tensors(const MemoryLayer& layer) {
  if (layer.n_expert == 0 || layer.n_expert > kMaxExperts)
    return fix_input(std::format("a layer of {} experts cannot be cut; the limit is {}.", layer.n_expert, kMaxExperts));
  std::vector<Slabs> out;
  bool any_weight = false;
  for (const MemoryTensor& tensor : layer.tensors) {
    const auto name = parse_expert_tensor(tensor.name);
    if (!name) return fix_input(std::format("the tensor '{}' is not one of routed experts.", tensor.name));
    if (!out.empty() && (name->layer != out.front().name.layer || name->group != out.front().name.group))
      return fix_input(std::format("the tensors '{}' and '{}' are not of one layer.", out.front().tensor->name, tensor.name));
    const std::size_t dimension = stacked_dimension(name->part);
    const auto bytes = tensor_bytes(tensor.type, tensor.ne);
    bool stacked = bytes && *bytes > 0 && tensor.ne[dimension] == layer.n_expert;
    for (std::size_t i = dimension + 1; i < tensor.ne.size(); ++i) stacked = stacked && tensor.ne[i] == 1;
    if (dimension == 0) stacked = stacked && ggml_blck_size(tensor.type) == 1;
    if (!stacked || tensor.data == nullptr)
      return fix_input(std::format("the tensor '{}' does not have one part for each of {} experts.", tensor.name, layer.n_expert));
    any_weight = any_weight || name->part == ExpertPart::kWeight;
    out.push_back({&tensor, *name, tensor.ne, *bytes / layer.n_expert});
  }
  if (!any_weight) return fix_input("a layer without weights of experts cannot be cut.");
  std::ranges::sort(out, {}, [](const Slabs& slabs) -> const std::string& { return slabs.tensor->name; });
  return out;
}

}  // namespace

Result<MemorySliceCost> memory_slice_cost(const MemoryLayer& layer) {
  KVASIR_ASSIGN(const std::vector<Slabs> tensors, check_tensors(layer));
  MemorySliceCost cost{.bytes_per_expert = sizeof(std::uint32_t), .fixed_bytes = kFixedBytes};
  for (const Slabs& slabs : tensors) {
    cost.bytes_per_expert += slabs.slab_bytes + kHashTextBytes;
    cost.fixed_bytes += kFixedTensorBytes;
  }
  return cost;
}

Result<Bytes> make_memory_slice(const MemoryLayer& layer, const ExpertSet& kept) {
  KVASIR_ASSIGN(const std::vector<Slabs> tensors, check_tensors(layer));
  if (kept.empty() || kept.end() > layer.n_expert)
    return fix_input(std::format("experts {} are not experts of a layer of {}.", format_ranges(kept), layer.n_expert));
  const std::vector<std::uint32_t> ids = kept.ids();
  const std::uint32_t number = tensors.front().name.layer;
  const ExpertGroup group = tensors.front().name.group;

  HeaderBuilder header;
  header.add_string("general.architecture", kArchitecture);
  header.add_u32(kSliceVersionKey, kSliceVersion);
  header.add_string(kSliceModelNameKey, layer.model_name);
  header.add_u32(kSliceEmbdKey, layer.n_embd);
  header.add_u32_array(kSliceLayersKey, std::span(&number, 1));
  header.add_u32_array(slice_experts_key(number, group), ids);
  header.add_u32(slice_expert_count_key(number, group), layer.n_expert);
  header.add_string(slice_layer_id_key(number, group), to_hex(layer.id));
  for (const Slabs& slabs : tensors) {
    std::vector<std::string> hashes;
    hashes.reserve(ids.size());
    for (const std::uint32_t id : ids) {
      Blake3 hasher;
      hasher.update(ByteSpan(slabs.tensor->data + id * slabs.slab_bytes, slabs.slab_bytes));
      hashes.push_back(to_hex(hasher.finish()));
    }
    header.add_string_array(slice_hashes_key(slabs.tensor->name), hashes);
  }
  std::vector<std::uint64_t> offsets;
  for (const Slabs& slabs : tensors) {
    Shape ne = slabs.ne;
    ne[stacked_dimension(slabs.name.part)] = ids.size();
    offsets.push_back(header.add_tensor(slabs.tensor->name, slabs.tensor->type, ne));
  }

  Bytes out = header.header();
  const std::size_t data = out.size();
  const auto total = checked_add(std::uint64_t{data}, header.data_bytes());
  if (!total) return fix_input("the experts are too many for one slice.");
  out.resize(*total);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::byte* to = out.data() + data + offsets[i];
    for (const Range& range : kept.ranges()) {
      const std::uint64_t bytes = (range.end - range.begin) * tensors[i].slab_bytes;
      std::memcpy(to, tensors[i].tensor->data + range.begin * tensors[i].slab_bytes, bytes);
      to += bytes;
    }
  }
  return out;
}

}  // namespace kvasir::gguf
