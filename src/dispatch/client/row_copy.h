// The loops that touch every value of an answer.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/bytes.h"
#include "wire/messages.h"

namespace kvasir::dispatch {

// A value enters the residual stream only below this size. Trained models stay below 1e6, so
// honest answers never reach it; up to it the sum of squares of any row fits f32, so that no
// later norm overflows.
inline constexpr float kSaneMax = 0x1p40f;

// Sane is: smaller than kSaneMax, which leaves out infinities and NaNs (their bits, without
// the sign, compare as larger integers). Four at a time by hand: at -O2 the compiler makes no
// vectors of a loop whose length it does not know, and then this test costs as much as the
// copy of a whole answer.
using FloatBits4 [[gnu::vector_size(16)]] = std::int32_t;  // signed: SSE2 has no other comparison
inline constexpr std::int32_t kMagnitude = 0x7fffffff;
inline constexpr std::uint32_t kExponent = 0x7f800000;
inline constexpr std::int32_t kSaneBits = std::bit_cast<std::int32_t>(kSaneMax);

// Copies `n` values and says whether all are sane; the bits are kept, NaNs included.
inline bool copy_sane(const std::byte* from, float* to, std::size_t n) {
  constexpr FloatBits4 kMagnitudes = {kMagnitude, kMagnitude, kMagnitude, kMagnitude};
  constexpr FloatBits4 kLimits = {kSaneBits, kSaneBits, kSaneBits, kSaneBits};
  FloatBits4 bad = {}, bad2 = {};
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    FloatBits4 a, b;
    std::memcpy(&a, from + i * 4, 16);
    std::memcpy(&b, from + i * 4 + 16, 16);
    std::memcpy(to + i, &a, 16);
    std::memcpy(to + i + 4, &b, 16);
    bad |= (a & kMagnitudes) >= kLimits;
    bad2 |= (b & kMagnitudes) >= kLimits;
  }
  bad |= bad2;
  std::int32_t any = bad[0] | bad[1] | bad[2] | bad[3];
  for (; i < n; ++i) {
    std::int32_t bits;
    std::memcpy(&bits, from + i * 4, 4);
    std::memcpy(to + i, &bits, 4);
    any |= static_cast<std::int32_t>((bits & kMagnitude) >= kSaneBits);
  }
  return any == 0;
}

// The largest bits of a value without its sign: as integers these order like the values, with
// infinity and then NaN above all others.
inline std::uint32_t largest_bits(std::span<const float> values) {
  using Bits4 [[gnu::vector_size(16)]] = std::int32_t;  // signed: SSE2 has no other comparison
  constexpr Bits4 kNoSign = {0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff};
  Bits4 top = {}, top2 = {};
  std::size_t i = 0;
  for (; i + 8 <= values.size(); i += 8) {
    Bits4 a, b;
    std::memcpy(&a, values.data() + i, 16);
    std::memcpy(&b, values.data() + i + 4, 16);
    a &= kNoSign;
    b &= kNoSign;
    top = top > a ? top : a;
    top2 = top2 > b ? top2 : b;
  }
  top = top > top2 ? top : top2;
  auto largest = static_cast<std::uint32_t>(std::max(std::max(top[0], top[1]), std::max(top[2], top[3])));
  for (; i < values.size(); ++i) largest = std::max(largest, std::bit_cast<std::uint32_t>(values[i]) & 0x7fffffff);
  return largest;
}

inline bool all_sane(std::span<const float> values) { return largest_bits(values) < static_cast<std::uint32_t>(kSaneBits); }
inline bool has_nan(std::span<const float> values) { return largest_bits(values) > kExponent; }

// Whether every value stays finite in that type (docs/protocol.md, section 5).
inline bool fits(wire::RowType type, std::span<const float> values) {
  switch (type) {
    case wire::RowType::kF16: return largest_bits(values) < std::bit_cast<std::uint32_t>(65520.0f);
    case wire::RowType::kQ8: return largest_bits(values) < std::bit_cast<std::uint32_t>(8.3e6f);
    case wire::RowType::kF32:
    case wire::RowType::kBF16: break;
  }
  return true;  // the widest there is; what overflows even that is recomputed
}

// sum += row
inline void add_row(std::span<const float> row, std::span<float> sum) {
  using Float4 [[gnu::vector_size(16)]] = float;
  std::size_t i = 0;
  for (; i + 4 <= row.size(); i += 4) {
    Float4 a, b;
    std::memcpy(&a, row.data() + i, 16);
    std::memcpy(&b, sum.data() + i, 16);
    b += a;
    std::memcpy(sum.data() + i, &b, 16);
  }
  for (; i < row.size(); ++i) sum[i] += row[i];
}

// Calls the cache lines of an output in for writing. After some milliseconds of other work an
// output of 100 KB costs 20 us more to write than a warm one; while a round waits, that is free.
inline void warm_for_writing(const float* out, std::size_t n) {
  constexpr std::size_t kLineFloats = 64 / sizeof(float);
  constexpr std::size_t kWarmFloatsMax = (256 << 10) / sizeof(float);  // well inside a core's own cache
  for (std::size_t i = 0; i < std::min(n, kWarmFloatsMax); i += kLineFloats) __builtin_prefetch(out + i, 1);
}

}  // namespace kvasir::dispatch
