// What stands for an expert weight in a backbone file: a tensor of the same shape in the
// smallest type, all holes but for its first 64 bytes, which say what belongs there. A
// backend that is given the tensor (by set_tensor or in mapped memory) finds the layer's
// identity in them without knowing the file.
//
//   offset  size
//        0     8  "KVASIRPH"
//        8     4  u32 version, 1
//       12     4  u32 ggml type of the weight in the model
//       16    32  LayerId of the weight's (layer, group)
//       48     8  u64 size of the weight in the model, bytes
//       56     8  the first 8 bytes of BLAKE3-256 over bytes 0:56
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/bytes.h"
#include "gguf/ggml_type.h"
#include "gguf/layer_id.h"

namespace kvasir::gguf {

inline constexpr std::size_t kPlaceholderBytes = 64;

struct Placeholder {
  ggml_type type{};
  LayerId layer_id{};
  std::uint64_t nbytes = 0;
  friend bool operator==(const Placeholder&, const Placeholder&) = default;
};

std::array<std::byte, kPlaceholderBytes> encode_placeholder(const Placeholder& placeholder);
// nullopt unless `bytes` begins with an intact placeholder of a known version: real weights.
std::optional<Placeholder> decode_placeholder(ByteSpan bytes);

// The type in which a tensor of this shape takes the fewest bytes, but room for the
// placeholder. nullopt for a tensor too small for it in any type.
std::optional<ggml_type> placeholder_type(const Shape& ne);

}  // namespace kvasir::gguf
