// Proof that a node holds what it claims: the hash of a span that the hub chose, with a
// nonce in front so that nothing can be computed beforehand. Hub and node run the same code,
// one on the model, the other on its slice.
//
// The bytes of an expert are its slabs in all tensors of the layer's leading group (exps;
// chexps where there is nothing else) that have one slab an expert, in the order of their
// names. The hash is BLAKE3-256 over the nonce's text and the span.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/error.h"
#include "gguf/moe_model.h"

namespace kvasir::hub {

// The group whose experts the hub counts and hands out; null for a dense layer.
const gguf::LayerExperts* leading_group(const gguf::MoeModel& model, std::uint32_t layer);

std::uint64_t proof_bytes(const gguf::LayerExperts& layer);

// kFixInput if the model does not hold that expert, or the span is not inside its bytes.
Result<gguf::Hash> hash_span(const gguf::MoeModel& model, std::uint32_t layer, std::uint32_t expert,
                             std::uint64_t offset, std::uint64_t length, std::string_view nonce);

}  // namespace kvasir::hub
