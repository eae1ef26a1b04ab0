// A slice of one layer's experts made from tensors in memory, for a worker that has no file.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "base/error.h"
#include "base/expert_set.h"
#include "gguf/ggml_type.h"
#include "gguf/layer_id.h"

namespace kvasir::gguf {

// A whole tensor of the model, contiguous: a weight [n_in, n_out, n_expert], a bias [n, n_expert]
// or a scale [n_expert].
struct MemoryTensor {
  std::string name;  // as parse_expert_tensor reads it
  ggml_type type{};
  Shape ne{1, 1, 1, 1};
  const std::byte* data = nullptr;
};

// All of one (layer, group). The data are borrowed.
struct MemoryLayer {
  LayerId id{};
  std::string_view model_name;
  std::uint32_t n_embd = 0;
  std::uint32_t n_expert = 0;
  std::span<const MemoryTensor> tensors;
};

// What an expert adds to the slice, and what a slice has besides its experts, at most; for
// sharing experts out. Refuses tensors that are not the same layer's, one slab an expert.
struct MemorySliceCost {
  std::uint64_t bytes_per_expert = 0;
  std::uint64_t fixed_bytes = 0;
};
Result<MemorySliceCost> memory_slice_cost(const MemoryLayer& layer);

// The bytes of the slice that keeps `kept` (not empty, inside the layer), with the hashes of its
// slabs, so that its receiver can check it.
Result<Bytes> make_memory_slice(const MemoryLayer& layer, const ExpertSet& kept);

}  // namespace kvasir::gguf
