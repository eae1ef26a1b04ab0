// Rows of f32 as they travel: f32, f16, bf16, q8.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/check.h"
#include "wire/codec.h"
#include "wire/row_kernels.h"

namespace kvasir::wire {
namespace {

constexpr std::size_t kQ8Values = 32;
constexpr std::size_t kQ8BlockBytes = 2 + kQ8Values;

// Each loop below is written once and compiled twice on x86-64, whose baseline has no
// instruction for f16.
#define KVASIR_INLINE [[gnu::always_inline]] inline

// --- f16: the compiler's own type rounds to nearest even on every machine --------------

KVASIR_INLINE std::uint16_t to_f16(float value) { return std::bit_cast<std::uint16_t>(static_cast<_Float16>(value)); }
KVASIR_INLINE float from_f16(std::uint16_t bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }

KVASIR_INLINE void encode_f16(std::span<const float> values, std::byte* out) {
  for (std::size_t i = 0; i < values.size(); ++i) store_le(out + 2 * i, to_f16(values[i]));
}

KVASIR_INLINE void decode_f16(const std::byte* in, std::span<float> out) {
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = from_f16(load_le<std::uint16_t>(in + 2 * i));
}

// --- bf16 ----------------------------------------------------------------------------

KVASIR_INLINE std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  // Rounding could carry a NaN's payload into infinity, so a NaN keeps its top and gets quiet.
  const std::uint32_t quiet = bits >> 16 | 0x40;
  const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

KVASIR_INLINE void encode_bf16(std::span<const float> values, std::byte* out) {
  for (std::size_t i = 0; i < values.size(); ++i) store_le(out + 2 * i, to_bf16(values[i]));
}

KVASIR_INLINE void decode_bf16(const std::byte* in, std::span<float> out) {
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = std::bit_cast<float>(std::uint32_t{load_le<std::uint16_t>(in + 2 * i)} << 16);
}

// --- q8: blocks of an f16 scale and 32 x i8 ---------------------------------------------

KVASIR_INLINE void encode_q8_block(const float* values, std::byte* out) {
  // As integers, magnitudes order like the floats and every NaN and infinity lies on top.
  std::int32_t top = 0;
  for (std::size_t i = 0; i < kQ8Values; ++i) top = std::max(top, std::bit_cast<std::int32_t>(values[i]) & 0x7fffffff);
  const auto largest = std::bit_cast<float>(top);
  const std::uint16_t scale_bits = to_f16(largest / 127.0f);
  const float scale = from_f16(scale_bits);
  if (!std::isfinite(largest) || !std::isfinite(scale)) {
    store_le(out, to_f16(NAN));
    std::memset(out + 2, 0, kQ8Values);
    return;
  }
  store_le(out, scale_bits);
  // Quantising by the scale as the reader will see it, rounded to f16, gives the nearest value.
  const float inverse = scale == 0 ? 0.0f : 1.0f / scale;
  std::array<std::int8_t, kQ8Values> quants;
  for (std::size_t i = 0; i < kQ8Values; ++i) {
    // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, without a call; the
    // clamp comes first because a scale rounded down (subnormal) can give more than 127.
    constexpr float kRounder = 12582912.0f;
    const float scaled = std::min(std::max(values[i] * inverse, -127.0f), 127.0f) + kRounder;
    quants[i] = static_cast<std::int8_t>(std::bit_cast<std::int32_t>(scaled) - std::bit_cast<std::int32_t>(kRounder));
  }
  std::memcpy(out + 2, quants.data(), kQ8Values);
}

KVASIR_INLINE void encode_q8(std::span<const float> values, std::byte* out) {
  for (std::size_t b = 0; b < values.size() / kQ8Values; ++b)
    encode_q8_block(values.data() + b * kQ8Values, out + b * kQ8BlockBytes);
}

KVASIR_INLINE void decode_q8(const std::byte* in, std::span<float> out) {
  for (std::size_t b = 0; b < out.size() / kQ8Values; ++b, in += kQ8BlockBytes) {
    const float scale = from_f16(load_le<std::uint16_t>(in));
    std::array<std::int8_t, kQ8Values> quants;
    std::memcpy(quants.data(), in + 2, kQ8Values);
    for (std::size_t i = 0; i < kQ8Values; ++i) out[b * kQ8Values + i] = scale * quants[i];
  }
}

}  // namespace

// --- the two builds ---------------------------------------------------------------------

constexpr RowKernels kBaselineRowKernels = {
    [](std::span<const float> values, std::byte* out) { encode_f16(values, out); },
    [](std::span<const float> values, std::byte* out) { encode_bf16(values, out); },
    [](std::span<const float> values, std::byte* out) { encode_q8(values, out); },
    [](const std::byte* in, std::span<float> out) { decode_f16(in, out); },
    [](const std::byte* in, std::span<float> out) { decode_bf16(in, out); },
    [](const std::byte* in, std::span<float> out) { decode_q8(in, out); },
};

#if defined(__x86_64__)
namespace {

#define KVASIR_AVX2 __attribute__((target("avx2,f16c")))

// Compilers do not vectorise f16 conversions by themselves.
KVASIR_AVX2 void encode_f16_avx2(std::span<const float> values, std::byte* out) {
  std::size_t i = 0;
  for (; i + 8 <= values.size(); i += 8) {
    const __m128i half =
        _mm256_cvtps_ph(_mm256_loadu_ps(values.data() + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i), half);
  }
  encode_f16(values.subspan(i), out + 2 * i);
}

KVASIR_AVX2 void decode_f16_avx2(const std::byte* in, std::span<float> out) {
  std::size_t i = 0;
  for (; i + 8 <= out.size(); i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 2 * i));
    _mm256_storeu_ps(out.data() + i, _mm256_cvtph_ps(half));
  }
  decode_f16(in + 2 * i, out.subspan(i));
}

KVASIR_AVX2 void encode_bf16_avx2(std::span<const float> values, std::byte* out) { encode_bf16(values, out); }
KVASIR_AVX2 void decode_bf16_avx2(const std::byte* in, std::span<float> out) { decode_bf16(in, out); }
KVASIR_AVX2 void encode_q8_avx2(std::span<const float> values, std::byte* out) { encode_q8(values, out); }
KVASIR_AVX2 void decode_q8_avx2(const std::byte* in, std::span<float> out) { decode_q8(in, out); }

}  // namespace

const RowKernels& best_row_kernels() {
  static const RowKernels best = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")
                                     ? RowKernels{encode_f16_avx2, encode_bf16_avx2, encode_q8_avx2,
                                                  decode_f16_avx2, decode_bf16_avx2, decode_q8_avx2}
                                     : kBaselineRowKernels;
  return best;
}
#else
const RowKernels& best_row_kernels() { return kBaselineRowKernels; }
#endif

std::optional<std::size_t> row_bytes(RowType type, std::uint32_t n_embd) {
  switch (type) {
    case RowType::kF32: return std::size_t{n_embd} * 4;
    case RowType::kF16:
    case RowType::kBF16: return std::size_t{n_embd} * 2;
    case RowType::kQ8:
      if (n_embd % kQ8Values != 0) return std::nullopt;
      return n_embd / kQ8Values * kQ8BlockBytes;
  }
  return std::nullopt;
}

void encode_row(RowType type, std::span<const float> values, std::span<std::byte> out) {
  KVASIR_CHECK(row_bytes(type, static_cast<std::uint32_t>(values.size())) == out.size());
  if (values.empty()) return;
  switch (type) {
    case RowType::kF32: std::memcpy(out.data(), values.data(), out.size()); return;
    case RowType::kF16: return best_row_kernels().f16_encode(values, out.data());
    case RowType::kBF16: return best_row_kernels().bf16_encode(values, out.data());
    case RowType::kQ8: return best_row_kernels().q8_encode(values, out.data());
  }
}

void decode_row(RowType type, ByteSpan bytes, std::span<float> out) {
  KVASIR_CHECK(row_bytes(type, static_cast<std::uint32_t>(out.size())) == bytes.size());
  if (out.empty()) return;
  switch (type) {
    case RowType::kF32: std::memcpy(out.data(), bytes.data(), bytes.size()); return;
    case RowType::kF16: return best_row_kernels().f16_decode(bytes.data(), out);
    case RowType::kBF16: return best_row_kernels().bf16_decode(bytes.data(), out);
    case RowType::kQ8: return best_row_kernels().q8_decode(bytes.data(), out);
  }
}

}  // namespace kvasir::wire
