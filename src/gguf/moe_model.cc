#include "gguf/moe_model.h"

#include <algorithm>
#include <format>
#include <map>

#include "base/check.h"
#include "base/hex.h"
#include "gguf/slice_format.h"

namespace kvasir::gguf {
namespace {

Result<LayerId> parse_layer_id(const GgufFile& file, const std::string& key) {
  KVASIR_ASSIGN(std::string text, file.get_string(key));
  const auto bytes = from_hex(text);
  LayerId id;
  if (!bytes || bytes->size() != id.size())
    return fix_input(std::format("'{}' is not valid: '{}' is not 64 hexadecimal digits; cut the file again.",
                                 file.name(), key));
  std::ranges::copy(*bytes, id.begin());
  return id;
}

// Whether a tensor has one contiguous slab for each of n experts.
bool is_stacked(const ExpertTensor& tensor, std::uint64_t n) {
  const std::size_t dimension = stacked_dimension(tensor.id.part);
  // One value an expert can be cut out only where a block is one value.
  if (dimension == 0 && ggml_blck_size(tensor.type) != 1) return false;
  for (std::size_t i = dimension + 1; i < tensor.ne.size(); ++i)
    if (tensor.ne[i] != 1) return false;
  return tensor.ne[dimension] == n;
}

// A file name without folder, query and extension, for models without a name of their own.
std::string stem_of(std::string_view name) {
  name = name.substr(0, name.find('?'));
  name = name.substr(name.rfind('/') + 1);
  if (name.ends_with(".gguf")) name.remove_suffix(5);
  return std::string(name);
}

}  // namespace

std::string_view to_string(FileKind kind) {
  switch (kind) {
    case FileKind::kModel: return "model";
    case FileKind::kSlice: return "slice";
    case FileKind::kBackbone: return "backbone";
  }
  return "unknown";
}

std::size_t stacked_dimension(ExpertPart part) {
  switch (part) {
    case ExpertPart::kWeight: return 2;
    case ExpertPart::kBias: return 1;
    case ExpertPart::kScale:
    case ExpertPart::kInputScale: return 0;
  }
  return 0;
}

const ExpertTensor* LayerExperts::find(ExpertRole role, ExpertPart part) const {
  for (const ExpertTensor& tensor : tensors)
    if (tensor.id.role == role && tensor.id.part == part) return &tensor;
  return nullptr;
}

std::uint64_t LayerExperts::bytes_per_expert() const {
  std::uint64_t total = 0;
  for (const ExpertTensor& tensor : tensors)
    if (tensor.per_expert) total += tensor.bytes_per_expert;
  return total;
}

std::uint32_t slab_count(const LayerExperts& layer, const ExpertTensor& tensor) {
  return tensor.per_expert ? layer.held.size() : 1;
}

Result<MoeModel> MoeModel::open(const std::string& name, const SourceOpener& opener) {
  KVASIR_ASSIGN(ModelFiles files, ModelFiles::open(name, opener));
  return from_files(std::move(files));
}

Result<MoeModel> MoeModel::from_files(ModelFiles files) {
  MoeModel model(std::move(files));
  KVASIR_TRY(model.read_metadata());
  KVASIR_TRY(model.collect_layers());
  for (LayerExperts& layer : model.layers_) KVASIR_TRY(model.finish_layer(layer));
  if (model.kind_ == FileKind::kBackbone) KVASIR_TRY(model.finish_backbone());
  for (const LayerExperts& layer : model.layers_) model.n_expert_ = std::max(model.n_expert_, layer.n_expert);
  return model;
}

Status MoeModel::read_metadata() {
  const GgufFile& file = files_.metadata();
  KVASIR_ASSIGN(architecture_, file.get_string("general.architecture"));
  if (const auto version = file.get_uint(kSliceVersionKey)) {
    kind_ = FileKind::kSlice;
    if (*version != kSliceVersion)
      return fix_input(std::format("'{}' is a slice of format {}, and this program reads format {}; use the "
                                   "program that cut it.",
                                   file.name(), *version, kSliceVersion));
  } else if (const auto backbone = file.get_uint(kBackboneVersionKey)) {
    kind_ = FileKind::kBackbone;
    if (*backbone != kBackboneVersion)
      return fix_input(std::format("'{}' is a backbone file of format {}, and this program reads format {}; "
                                   "write it anew.",
                                   file.name(), *backbone, kBackboneVersion));
  }
  const std::string_view name_key = kind_ == FileKind::kSlice ? kSliceModelNameKey : "general.name";
  model_name_ = file.get_string(name_key).value_or(stem_of(file.name()));
  const auto number = [&](std::string_view what) {
    const std::uint64_t value = file.get_uint(std::format("{}.{}", architecture_, what)).value_or(0);
    return static_cast<std::uint32_t>(std::min<std::uint64_t>(value, UINT32_MAX));
  };
  n_layer_ = number("block_count");
  n_expert_ = number("expert_count");
  n_expert_used_ = number("expert_used_count");
  n_embd_ = number("embedding_length");
  // Layers and experts are counted through below, so their numbers are bounded like everything read.
  if (n_layer_ > kMaxLayers || n_expert_ > kMaxExperts)
    return fix_input(std::format("'{}' is not valid: it claims {} layers and {} experts, past the limits of {} and {}.",
                                 file.name(), n_layer_, n_expert_, kMaxLayers, kMaxExperts));
  return {};
}

Status MoeModel::collect_layers() {
  std::map<std::pair<std::uint32_t, ExpertGroup>, LayerExperts> layers;
  for (const ModelFiles::Entry& entry : files_.tensors()) {
    const auto id = parse_expert_tensor(entry.tensor->name);
    if (!id) continue;
    LayerExperts& layer = layers[{id->layer, id->group}];
    layer.layer = id->layer;
    layer.group = id->group;
    ExpertTensor tensor;
    tensor.name = entry.tensor->name;
    tensor.id = *id;
    tensor.type = entry.tensor->type;
    tensor.ne = entry.tensor->ne;
    tensor.file = entry.file;
    tensor.offset = entry.tensor->offset;
    tensor.nbytes = entry.tensor->nbytes;
    layer.tensors.push_back(std::move(tensor));
  }
  for (auto& [key, layer] : layers) {
    std::ranges::sort(layer.tensors, {}, &ExpertTensor::name);
    const auto is_weight = [](const ExpertTensor& t) { return t.id.part == ExpertPart::kWeight; };
    // Side tensors without a weight are nothing that could be served.
    if (std::ranges::any_of(layer.tensors, is_weight)) layers_.push_back(std::move(layer));
  }
  return {};
}

Status MoeModel::finish_layer(LayerExperts& layer) {
  const std::string& file = file_name();
  std::uint64_t n_stacked = 0;
  for (const ExpertTensor& tensor : layer.tensors) {
    if (tensor.id.part != ExpertPart::kWeight) continue;
    const std::uint64_t n = tensor.ne[2];
    if (tensor.ne[3] != 1 || n > kMaxExperts || (n_stacked != 0 && n != n_stacked))
      return fix_input(std::format("'{}' is not valid: '{}' has {} experts, unlike the other weights of layer {} "
                                   "or past the limit of {}.", file, tensor.name, n, layer.layer, kMaxExperts));
    n_stacked = n;
  }

  if (kind_ == FileKind::kSlice) {
    KVASIR_TRY(finish_slice_layer(layer, n_stacked));
  } else {
    layer.n_expert = static_cast<std::uint32_t>(n_stacked);
    if (kind_ == FileKind::kModel) layer.held = ExpertSet::all(layer.n_expert);
  }

  for (ExpertTensor& tensor : layer.tensors) {
    tensor.per_expert = is_stacked(tensor, n_stacked);
    if (tensor.per_expert && kind_ == FileKind::kSlice && tensor.id.part != ExpertPart::kWeight) {
      // A shared side tensor can have as many values as experts are held; then the number
      // of hashes tells which it is.
      const KeyValue* hashes = files_.metadata().find(slice_hashes_key(tensor.name));
      tensor.per_expert = hashes != nullptr && hashes->count == n_stacked;
    }
    tensor.bytes_per_expert = tensor.per_expert ? tensor.nbytes / n_stacked : tensor.nbytes;
  }
  return {};
}

Status MoeModel::finish_slice_layer(LayerExperts& layer, std::uint64_t n_stacked) {
  const GgufFile& file = files_.metadata();
  const std::string key = slice_experts_key(layer.layer, layer.group);
  KVASIR_ASSIGN(std::vector<std::uint32_t> ids, file.get_u32_array(key, kMaxExperts));
  const auto n_expert = file.get_uint(slice_expert_count_key(layer.layer, layer.group)).value_or(0);
  const bool ascending = std::ranges::adjacent_find(ids, std::ranges::greater_equal{}) == ids.end();
  if (ids.size() != n_stacked || !ascending || n_expert > kMaxExperts || ids.back() >= n_expert)
    return fix_input(std::format("'{}' is not valid: '{}' does not list {} different experts of {} in ascending order; "
                                 "cut the slice again.", file.name(), key, n_stacked, n_expert));
  layer.n_expert = static_cast<std::uint32_t>(n_expert);
  layer.held = ExpertSet::from_ids(std::move(ids));
  KVASIR_ASSIGN(layer.stored_id, parse_layer_id(file, slice_layer_id_key(layer.layer, layer.group)));
  return {};
}

Status MoeModel::finish_backbone() {
  const GgufFile& file = files_.metadata();
  KVASIR_ASSIGN(std::vector<std::string> names, file.get_string_array(kBackboneTensorsKey, kMaxTensors));
  KVASIR_ASSIGN(std::vector<std::uint32_t> types, file.get_u32_array(kBackboneTypesKey, kMaxTensors));
  std::map<std::string_view, std::uint32_t> type_of;
  for (std::size_t i = 0; i < std::min(names.size(), types.size()); ++i) type_of[names[i]] = types[i];
  for (LayerExperts& layer : layers_) {
    KVASIR_ASSIGN(layer.stored_id, parse_layer_id(file, backbone_layer_id_key(layer.layer, layer.group)));
    for (ExpertTensor& tensor : layer.tensors) {
      if (tensor.id.part != ExpertPart::kWeight) continue;
      const auto found = type_of.find(tensor.name);
      const auto type = found == type_of.end() ? std::nullopt : type_from_number(found->second);
      const auto slab = type ? tensor_bytes(*type, {tensor.ne[0], tensor.ne[1], 1, 1}) : std::nullopt;
      if (!slab)
        return fix_input(std::format("'{}' is not valid: it does not say the type of '{}'; write it anew.",
                                     file.name(), tensor.name));
      tensor.type = *type;
      tensor.bytes_per_expert = *slab;
    }
  }
  return {};
}

const LayerExperts* MoeModel::find(std::uint32_t layer, ExpertGroup group) const {
  for (const LayerExperts& candidate : layers_)
    if (candidate.layer == layer && candidate.group == group) return &candidate;
  return nullptr;
}

Status MoeModel::require_experts() const {
  if (layers_.empty())
    return fix_input(std::format("'{}' is a dense model ({}), without routed experts; give a Mixture-of-Experts model.",
                                 file_name(), architecture_));
  return {};
}

Status MoeModel::require_expert_data() const {
  KVASIR_TRY(require_experts());
  if (kind_ == FileKind::kBackbone)
    return fix_input(std::format("'{}' is a backbone file, whose experts were left out; give the model it was "
                                 "made from.", file_name()));
  return {};
}

Result<LayerId> MoeModel::layer_id(const LayerExperts& layer) const {
  if (layer.stored_id) return *layer.stored_id;
  std::vector<LayerIdTensor> weights;
  for (const ExpertTensor& tensor : layer.tensors) {
    if (tensor.id.part != ExpertPart::kWeight) continue;
    const ByteSource& source = files_.files()[tensor.file].source();
    weights.push_back({tensor.name, tensor.type, {tensor.ne[0], tensor.ne[1], tensor.ne[2]},
                       [&](std::uint32_t expert, std::uint64_t offset, std::span<std::byte> out) {
                         return source.read_at(tensor.offset + expert * tensor.bytes_per_expert + offset, out);
                       }});
  }
  return compute_layer_id(weights);
}

Status MoeModel::read_slab(const ExpertTensor& tensor, std::uint32_t slab, std::span<std::byte> out) const {
  KVASIR_TRY(require_expert_data());
  KVASIR_CHECK(out.size() == tensor.bytes_per_expert);
  KVASIR_CHECK(slab < tensor.nbytes / tensor.bytes_per_expert);
  return files_.files()[tensor.file].source().read_at(tensor.offset + slab * tensor.bytes_per_expert, out);
}

Result<std::vector<Hash>> MoeModel::slab_hashes(const ExpertTensor& tensor) const {
  const std::string key = slice_hashes_key(tensor.name);
  KVASIR_ASSIGN(std::vector<std::string> texts, files_.metadata().get_string_array(key, kMaxExperts));
  std::vector<Hash> out;
  for (const std::string& text : texts) {
    const auto bytes = from_hex(text);
    Hash hash;
    if (!bytes || bytes->size() != hash.size())
      return fix_input(std::format("'{}' is not valid: a hash of '{}' is not 64 hexadecimal digits; cut the "
                                   "slice again.",
                                   file_name(), tensor.name));
    std::ranges::copy(*bytes, hash.begin());
    out.push_back(hash);
  }
  if (out.size() != tensor.nbytes / tensor.bytes_per_expert)
    return fix_input(std::format("'{}' is not valid: '{}' has {} hashes for {} slabs; cut the slice again.",
                                 file_name(),
                                 tensor.name, out.size(), tensor.nbytes / tensor.bytes_per_expert));
  return out;
}

}  // namespace kvasir::gguf
