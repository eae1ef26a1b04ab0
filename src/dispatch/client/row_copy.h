// The loops that touch every value of an answer.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/bytes.h"

namespace kvasir::dispatch {

// A float is finite unless all its exponent bits are set. Four at a time by hand: at -O2 the
// compiler makes no vectors of a loop whose length it does not know, and then this test costs
// as much as the copy of a whole answer.
using FloatBits4 [[gnu::vector_size(16)]] = std::uint32_t;
inline constexpr std::uint32_t kExponent = 0x7f800000;

// Copies `n` values and says whether all are finite; the bits are kept, NaNs included.
inline bool copy_finite(const std::byte* from, float* to, std::size_t n) {
  constexpr FloatBits4 kExponents = {kExponent, kExponent, kExponent, kExponent};
  FloatBits4 bad = {}, bad2 = {};
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    FloatBits4 a, b;
    std::memcpy(&a, from + i * 4, 16);
    std::memcpy(&b, from + i * 4 + 16, 16);
    std::memcpy(to + i, &a, 16);
    std::memcpy(to + i + 4, &b, 16);
    bad |= (a & kExponents) == kExponents;
    bad2 |= (b & kExponents) == kExponents;
  }
  bad |= bad2;
  std::uint32_t any = bad[0] | bad[1] | bad[2] | bad[3];
  for (; i < n; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, from + i * 4, 4);
    std::memcpy(to + i, &bits, 4);
    any |= static_cast<std::uint32_t>((bits & kExponent) == kExponent);
  }
  return any == 0;
}

inline bool all_finite(std::span<const float> values) {
  std::uint32_t bad = 0;
  for (const float value : values)
    bad |= static_cast<std::uint32_t>((std::bit_cast<std::uint32_t>(value) & kExponent) == kExponent);
  return bad == 0;
}

// Calls the cache lines of an output in for writing. After some milliseconds of other work an
// output of 100 KB costs 20 us more to write than a warm one; while a round waits, that is free.
inline void warm_for_writing(const float* out, std::size_t n) {
  constexpr std::size_t kLineFloats = 64 / sizeof(float);
  constexpr std::size_t kWarmFloatsMax = (256 << 10) / sizeof(float);  // well inside a core's own cache
  for (std::size_t i = 0; i < std::min(n, kWarmFloatsMax); i += kLineFloats) __builtin_prefetch(out + i, 1);
}

}  // namespace kvasir::dispatch
