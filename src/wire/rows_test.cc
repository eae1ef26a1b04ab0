#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "wire/codec.h"
#include "wire/row_kernels.h"

namespace kvasir::wire {
namespace {

Bytes encoded(RowType type, std::span<const float> values) {
  Bytes out(*row_bytes(type, static_cast<std::uint32_t>(values.size())));
  encode_row(type, values, out);
  return out;
}

std::vector<float> decoded(RowType type, ByteSpan bytes, std::size_t n) {
  std::vector<float> out(n);
  decode_row(type, bytes, out);
  return out;
}

// Values that exercise rounding: any bit pattern, and magnitudes around f16's range.
std::vector<float> values_of(std::uint64_t seed, std::size_t n) {
  std::mt19937_64 random(seed);
  std::vector<float> out(n);
  for (float& value : out) {
    const auto bits = static_cast<std::uint32_t>(random());
    value = std::bit_cast<float>(bits);
    if (random() % 2 == 0)
      value = std::ldexp(static_cast<float>(static_cast<std::int32_t>(bits)), -47 + static_cast<int>(random() % 36));
  }
  return out;
}

TEST(Rows, Sizes) {
  EXPECT_EQ(row_bytes(RowType::kF32, 3072), 12288u);
  EXPECT_EQ(row_bytes(RowType::kF16, 3072), 6144u);
  EXPECT_EQ(row_bytes(RowType::kQ8, 3072), 96u * 34);
  EXPECT_EQ(row_bytes(RowType::kQ8, 3071), std::nullopt);
}

TEST(Rows, F32IsACopyOfBits) {
  const auto values = values_of(1, 1000);
  const auto back = decoded(RowType::kF32, encoded(RowType::kF32, values), values.size());
  EXPECT_EQ(std::memcmp(back.data(), values.data(), values.size() * 4), 0);
}

// The value of an f16 by the definition, without the compiler's type.
double f16_value(unsigned bits) {
  const int exponent = static_cast<int>(bits >> 10 & 31);
  const unsigned mantissa = bits & 0x3ff;
  return exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
}

TEST(Rows, EveryF16SurvivesBothWays) {
  Bytes all(0x10000 * 2);
  for (unsigned i = 0; i < 0x10000; ++i) store_le(all.data() + 2 * i, static_cast<std::uint16_t>(i));
  const auto values = decoded(RowType::kF16, all, 0x10000);
  for (unsigned i = 0; i < 0x7c00; ++i) {
    ASSERT_EQ(values[i], static_cast<float>(f16_value(i)));
    ASSERT_EQ(values[i + 0x8000], -static_cast<float>(f16_value(i)));
  }
  EXPECT_EQ(values[0x7c00], INFINITY);
  const Bytes back = encoded(RowType::kF16, values);
  for (unsigned i = 0; i < 0x10000; ++i) {
    const auto bits = load_le<std::uint16_t>(back.data() + 2 * i);
    if (std::isnan(values[i])) {
      ASSERT_GT(bits & 0x7fff, 0x7c00);
    } else {
      ASSERT_EQ(bits, i);
    }
  }
}

// Nearest, ties to the even neighbour; half way past the largest is infinity.
unsigned nearest_f16(double magnitude) {
  unsigned low = 0, high = 0x7c00;  // f16_value(0x7c00) = 65536, where infinity stands
  while (high - low > 1) {
    const unsigned middle = (low + high) / 2;
    (f16_value(middle) <= magnitude ? low : high) = middle;
  }
  if (magnitude >= f16_value(0x7c00)) return 0x7c00;
  const double below = magnitude - f16_value(low), above = f16_value(high) - magnitude;
  return below < above || (below == above && low % 2 == 0) ? low : high;
}

TEST(Rows, F16RoundsToNearestEven) {
  auto values = values_of(2, 40000);
  for (unsigned i = 0; i < 0x7c00; i += 7) {  // exact ties and their neighbours
    const auto tie = static_cast<float>((f16_value(i) + f16_value(i + 1)) / 2);
    values.insert(values.end(), {tie, -tie, std::nextafter(tie, INFINITY), std::nextafter(tie, 0.0f)});
  }
  values.insert(values.end(), {65504.0f, 65519.996f, 65520.0f, 1e30f, INFINITY, 0.0f, -0.0f});
  const Bytes row = encoded(RowType::kF16, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto bits = load_le<std::uint16_t>(row.data() + 2 * i);
    if (std::isnan(values[i])) {
      ASSERT_GT(bits & 0x7fff, 0x7c00) << i;
      continue;
    }
    const unsigned expected =
        nearest_f16(std::fabs(static_cast<double>(values[i]))) | (std::signbit(values[i]) ? 0x8000u : 0u);
    ASSERT_EQ(bits, expected) << values[i];
    // A short row has no full vector.
    ASSERT_EQ(load_le<std::uint16_t>(encoded(RowType::kF16, std::span(values).subspan(i, 1)).data()), bits)
        << values[i];
  }
}

TEST(Rows, BF16RoundsToNearestEven) {
  auto values = values_of(3, 40000);
  values.insert(values.end(), {0.0f, -0.0f, INFINITY, -INFINITY, std::numeric_limits<float>::max(),
                               std::bit_cast<float>(0x7f800001u), std::bit_cast<float>(0xffffffffu)});
  const Bytes row = encoded(RowType::kBF16, values);
  const auto back = decoded(RowType::kBF16, row, values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i])) {
      ASSERT_TRUE(std::isnan(back[i]));
      continue;
    }
    const auto bits = std::bit_cast<std::uint32_t>(values[i]);
    const float low = std::bit_cast<float>(bits & 0xffff0000u);
    const std::uint32_t high_bits = (bits & 0xffff0000u) + 0x10000u;
    if (bits % 0x10000 == 0) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(back[i]), bits);
    } else {
      const unsigned rest = bits % 0x10000;
      const bool up = rest > 0x8000 || (rest == 0x8000 && (bits >> 16) % 2 == 1);
      ASSERT_EQ(back[i], up ? std::bit_cast<float>(high_bits) : low) << values[i];
    }
  }
}

TEST(Rows, Q8StaysWithinHalfAStep) {
  std::mt19937_64 random(4);
  std::normal_distribution<float> normal;
  for (int scale = -20; scale < 16; ++scale) {
    std::vector<float> values(320);
    for (float& value : values) value = std::ldexp(normal(random), scale);
    const Bytes row = encoded(RowType::kQ8, values);
    const auto back = decoded(RowType::kQ8, row, values.size());
    for (std::size_t b = 0; b < values.size() / 32; ++b) {
      float largest = 0;
      for (std::size_t i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(values[b * 32 + i]));
      // Half a step, the f16 rounding of the step at the largest value, and f16's smallest unit.
      const double bound = largest / 127.0 * 0.5 + largest * 0x1p-11 + 127 * 0x1p-25;
      for (std::size_t i = b * 32; i < b * 32 + 32; ++i) ASSERT_LE(std::fabs(values[i] - back[i]), bound) << scale;
    }
  }
}

// Each build of the loops gives the same bits.
TEST(Rows, BuildsAgree) {
  const RowKernels& a = kBaselineRowKernels;
  const RowKernels& b = best_row_kernels();
  auto values = values_of(5, 32 * 500);
  for (std::size_t i = 0; i < values.size(); ++i)  // most blocks of q8 should be finite
    if (i / 32 % 8 != 0) values[i] = std::fmod(values[i], 100.0f), values[i] = std::isnan(values[i]) ? 1.0f : values[i];
  const auto bits_of = [](const std::vector<float>& row) {
    std::vector<std::uint32_t> bits;
    for (const float value : row) bits.push_back(std::isnan(value) ? 0x7fc00000u : std::bit_cast<std::uint32_t>(value));
    return bits;
  };
  const auto compare = [&](RowType type, RowKernels::Encode encode_a, RowKernels::Encode encode_b,
                           RowKernels::Decode decode_a, RowKernels::Decode decode_b) {
    const std::size_t size = *row_bytes(type, static_cast<std::uint32_t>(values.size()));
    Bytes row_a(size), row_b(size);
    encode_a(values, row_a.data());
    encode_b(values, row_b.data());
    std::vector<float> from_a(values.size()), from_b(values.size()), crossed(values.size());
    decode_a(row_a.data(), from_a);
    decode_b(row_b.data(), from_b);
    decode_b(row_a.data(), crossed);
    EXPECT_EQ(bits_of(from_a), bits_of(from_b)) << static_cast<int>(type);
    EXPECT_EQ(bits_of(from_a), bits_of(crossed)) << static_cast<int>(type);
  };
  compare(RowType::kF16, a.f16_encode, b.f16_encode, a.f16_decode, b.f16_decode);
  compare(RowType::kBF16, a.bf16_encode, b.bf16_encode, a.bf16_decode, b.bf16_decode);
  compare(RowType::kQ8, a.q8_encode, b.q8_encode, a.q8_decode, b.q8_decode);
}

TEST(Rows, Q8GoldenBlock) {
  std::vector<float> values(32);
  for (int i = 0; i < 32; ++i)
    values[static_cast<std::size_t>(i)] = static_cast<float>(i - 16) * 127 / 16;  // largest 127: scale 1
  const Bytes row = encoded(RowType::kQ8, values);
  EXPECT_EQ(load_le<std::uint16_t>(row.data()), 0x3c00);
  EXPECT_EQ(load_le<std::int8_t>(row.data() + 2), -127);
  EXPECT_EQ(load_le<std::int8_t>(row.data() + 2 + 16), 0);
  EXPECT_EQ(load_le<std::int8_t>(row.data() + 2 + 17), 8);  // 7.9375
}

TEST(Rows, Q8BlocksThatCannotBeHeldDecodeAsNan) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), INFINITY, -INFINITY, 1e7f}) {
    std::vector<float> values(64, 1.0f);
    values[5] = bad;
    const auto back = decoded(RowType::kQ8, encoded(RowType::kQ8, values), values.size());
    for (std::size_t i = 0; i < 32; ++i) EXPECT_TRUE(std::isnan(back[i])) << bad;
    for (std::size_t i = 32; i < 64; ++i) EXPECT_NEAR(back[i], 1.0f, 0.005f);
  }
  const std::vector<float> zeros(32);
  EXPECT_EQ(decoded(RowType::kQ8, encoded(RowType::kQ8, zeros), 32), zeros);
}

}  // namespace
}  // namespace kvasir::wire
