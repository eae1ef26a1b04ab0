#include "plugin/layer_upload.h"

#include <ggml-backend.h>

#include <format>

#include "gguf/blake3_hasher.h"
#include "gguf/expert_tensor.h"

namespace kvasir::plugin {
namespace {

constexpr std::string_view kDomain = "kvasir uploaded layer v1\n";

gguf::Shape shape_of(const ggml_tensor* t) {
  gguf::Shape ne;
  for (std::size_t i = 0; i < ne.size(); ++i) ne[i] = static_cast<std::uint64_t>(t->ne[i]);
  return ne;
}

const std::byte* data_of(const ggml_tensor* t) { return static_cast<const std::byte*>(t->data); }

}  // namespace

Result<LayerUpload> LayerUpload::make(const ExpertFfn& ffn, const wire::LayerId& weights_id) {
  LayerUpload upload;
  const ffn::ExpertTensors& t = ffn.tensors;
  gguf::Blake3 hash;
  hash.update(std::as_bytes(std::span(kDomain)));
  hash.update(weights_id);
  for (const ggml_tensor* tensor : {t.gate, t.up, t.gate_up, t.down, t.gate_bias, t.up_bias, t.gate_up_bias, t.down_bias,
                                    t.gate_scale, t.up_scale, t.gate_up_scale, t.down_scale}) {
    if (tensor == nullptr) continue;
    const std::string name = ggml_get_name(tensor);
    const bool here = tensor->data != nullptr && (tensor->buffer == nullptr || ggml_backend_buffer_is_host(tensor->buffer));
    if (!here || !ggml_is_contiguous(tensor))
      return fix_input(std::format("{} cannot be uploaded from where it lies", name));
    upload.tensors_.push_back({.name = name, .type = tensor->type, .ne = shape_of(tensor), .data = data_of(tensor)});
    const auto parsed = gguf::parse_expert_tensor(name);
    if (parsed && parsed->part == gguf::ExpertPart::kWeight) continue;  // in the weights' id
    Bytes head;
    ByteWriter out(head);
    out.put(static_cast<std::uint32_t>(name.size()));
    out.put_bytes(name);
    out.put(static_cast<std::uint32_t>(tensor->type));
    for (const std::uint64_t n : upload.tensors_.back().ne) out.put(n);
    hash.update(head);
    hash.update(ByteSpan(data_of(tensor), ggml_nbytes(tensor)));
  }
  upload.layer_ = {.id = hash.finish(),
                   .model_name = "uploaded",
                   .n_embd = ffn.recipe.n_embd,
                   .n_expert = ffn.recipe.n_expert,
                   .tensors = upload.tensors_};
  KVASIR_ASSIGN(upload.cost_, gguf::memory_slice_cost(upload.layer_));
  upload.layer_.tensors = {};
  return upload;
}

dispatch::SliceMaker LayerUpload::slices() const {
  return {.fixed_bytes = cost_.fixed_bytes, .bytes_per_expert = cost_.bytes_per_expert, .make = [this](const ExpertSet& experts) {
            gguf::MemoryLayer layer = layer_;
            layer.tensors = tensors_;  // this object may have moved since make()
            return gguf::make_memory_slice(layer, experts);
          }};
}

}  // namespace kvasir::plugin
