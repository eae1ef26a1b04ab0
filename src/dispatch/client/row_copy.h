// The two loops that touch every value of an answer.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/bytes.h"

namespace kvasir::dispatch {

// A float is finite unless all its exponent bits are set. Written on the bits, and without a
// branch, so that the compiler makes vectors of it.
inline constexpr std::uint32_t kExponentBits = 0x7f800000;

inline bool all_finite(std::span<const float> values) {
  std::uint32_t bad = 0;
  for (const float value : values)
    bad |= static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(value) & kExponentBits) == kExponentBits);
  return bad == 0;
}

// Copies an f32 row and says whether all of it is finite.
inline bool copy_finite(ByteSpan row, std::span<float> out) {
  std::memcpy(out.data(), row.data(), out.size_bytes());
  return all_finite(out);
}

}  // namespace kvasir::dispatch
