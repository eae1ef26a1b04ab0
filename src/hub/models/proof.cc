#include "hub/models/proof.h"

#include <algorithm>
#include <format>

#include "base/math.h"
#include "hub/core/market.h"

namespace kvasir::hub {

const gguf::LayerExperts* leading_group(const gguf::MoeModel& model, std::uint32_t layer) {
  const auto* exps = model.find(layer, gguf::ExpertGroup::kExps);
  return exps != nullptr ? exps : model.find(layer, gguf::ExpertGroup::kChexps);
}

std::uint64_t proof_bytes(const gguf::LayerExperts& layer) {
  std::uint64_t sum = 0;
  for (const gguf::ExpertTensor& tensor : layer.tensors)
    if (tensor.per_expert) sum += tensor.bytes_per_expert;
  return sum;
}

Result<gguf::Hash> hash_span(const gguf::MoeModel& model, std::uint32_t layer, std::uint32_t expert,
                             std::uint64_t offset, std::uint64_t length, std::string_view nonce) {
  const gguf::LayerExperts* group = leading_group(model, layer);
  const auto rank = group == nullptr ? std::nullopt : group->held.rank(expert);
  if (!rank) return fix_input(std::format("expert {} of layer {} is not held here.", expert, layer));
  const auto end = checked_add(offset, length);
  if (!end || *end > proof_bytes(*group) || length > kProofSpanBytesMax)
    return fix_input(std::format("bytes {}:{} of an expert were asked for; layer {} has {} of each.", offset,
                                 offset + length, layer, proof_bytes(*group)));
  gguf::Blake3 hash;
  hash.update(std::as_bytes(std::span(nonce.data(), nonce.size())));
  Bytes buffer;
  std::uint64_t tensor_begin = 0;
  for (const gguf::ExpertTensor& tensor : group->tensors) {
    if (!tensor.per_expert) continue;
    const std::uint64_t from = std::max(offset, tensor_begin),
                        to = std::min(*end, tensor_begin + tensor.bytes_per_expert);
    if (from < to) {
      buffer.resize(static_cast<std::size_t>(to - from));
      const std::uint64_t at = tensor.offset + *rank * tensor.bytes_per_expert + (from - tensor_begin);
      KVASIR_TRY(model.files().files()[tensor.file].source().read_at(at, buffer));
      hash.update(buffer);
    }
    tensor_begin += tensor.bytes_per_expert;
  }
  return hash.finish();
}

}  // namespace kvasir::hub
