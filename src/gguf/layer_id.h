// The identity of the experts of one (layer, group): what a backbone and a worker compare
// before they work together. A hash over names, types, shapes and byte samples of four
// experts, so that it costs a few dozen kilobytes of reading, from a file or from memory.
//
// BLAKE3-256 over, integers little-endian:
//   the 23 bytes "kvasir expert layer v1\n"
//   for each .weight tensor, sorted by name (bytewise):
//     u32 length of the name, the name, u32 ggml type, u64 ne[0], u64 ne[1], u64 ne[2]
//     for each distinct expert of {0, n/3, 2n/3, n-1}, ascending, where n = ne[2]:
//       u32 expert, the first min(4096, slab) bytes of its slab, the last min(4096, slab)
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

#include "base/error.h"
#include "gguf/ggml_type.h"

namespace kvasir::gguf {

using LayerId = std::array<std::byte, 32>;

// A whole stacked weight [ne0, ne1, n_expert] of the model; slices carry the id as metadata.
struct LayerIdTensor {
  std::string_view name;
  ggml_type type{};
  std::array<std::uint64_t, 3> ne{};
  // Reads `out.size()` bytes of an expert's slab from `offset` on; always inside the slab.
  std::function<Status(std::uint32_t expert, std::uint64_t offset, std::span<std::byte> out)> read;
};

// The same for a tensor that lies in memory, contiguous.
struct LayerIdMemoryTensor {
  std::string_view name;
  ggml_type type{};
  std::array<std::uint64_t, 3> ne{};
  const std::byte* data = nullptr;
};

// Fails when a read fails, or for a shape whose size overflows.
Result<LayerId> compute_layer_id(std::span<const LayerIdTensor> weights);
Result<LayerId> compute_layer_id(std::span<const LayerIdMemoryTensor> weights);

}  // namespace kvasir::gguf
