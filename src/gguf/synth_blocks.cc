#include "gguf/synth_blocks.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <optional>

#include "base/bytes.h"
#include "base/check.h"

namespace kvasir::gguf {
namespace {

// xoshiro256++ (Blackman, Vigna), seeded by splitmix64: 8 bytes a nanosecond or so.
class Rng {
 public:
  explicit Rng(std::uint64_t key) {
    for (std::uint64_t& word : state_) {
      key += 0x9e3779b97f4a7c15;
      std::uint64_t z = key;
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
      z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
      word = z ^ (z >> 31);
    }
  }
  std::uint64_t next() {
    const std::uint64_t result = std::rotl(state_[0] + state_[3], 23) + state_[0];
    const std::uint64_t t = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= t;
    state_[3] = std::rotl(state_[3], 45);
    return result;
  }

 private:
  std::array<std::uint64_t, 4> state_;
};

// Where a block type keeps its f16 scales, and what spread random contents have at scale 1.
//   K-quants: w = d·s·q − dmin·m with s, m uniform in 0:64; dmin = centre·d brings the mean to 0.
struct BlockShape {
  ggml_type type;
  std::size_t bytes;
  std::size_t scale_at;
  std::optional<std::size_t> min_at;
  float centre;     // mean of q: dmin / d
  float deviation;  // of w at d = 1
};
constexpr std::array kBlockShapes = {
    BlockShape{GGML_TYPE_Q4_0, 18, 0, {}, 0, 4.64f},         // q - 8, q in 0:16
    BlockShape{GGML_TYPE_Q8_0, 34, 0, {}, 0, 73.9f},         // q in -128:128
    BlockShape{GGML_TYPE_Q4_K, 144, 0, 2, 7.5f, 258.0f},     // q in 0:16
    BlockShape{GGML_TYPE_Q5_K, 176, 0, 2, 15.5f, 527.0f},    // q in 0:32
    BlockShape{GGML_TYPE_Q6_K, 210, 208, {}, 0, 1366.0f},    // s in -128:128, q - 32 in -32:32
    BlockShape{GGML_TYPE_IQ4_XS, 136, 0, {}, 0, 1246.0f},    // s - 32 in -32:32, 16 uneven levels
};

constexpr std::size_t kMxfp4Bytes = 17;
constexpr float kMxfp4Deviation = 4.62f;  // of the 16 levels, with exponents 128 and 127 alike

const BlockShape* find_shape(ggml_type type) {
  const auto found = std::ranges::find(kBlockShapes, type, &BlockShape::type);
  return found == kBlockShapes.end() ? nullptr : &*found;
}

void fill_bits(Rng& rng, std::span<std::byte> out) {
  std::size_t at = 0;
  for (; at + sizeof(std::uint64_t) <= out.size(); at += sizeof(std::uint64_t)) store_le(out.data() + at, rng.next());
  if (at < out.size()) {
    const std::uint64_t word = rng.next();
    std::memcpy(out.data() + at, &word, out.size() - at);
  }
}

void set_scales(const BlockShape& shape, float deviation, std::span<std::byte> out) {
  KVASIR_CHECK(shape.bytes == ggml_type_size(shape.type) && out.size() % shape.bytes == 0);
  // 256 scales within ±25 %; the random byte where one goes chooses it.
  std::array<ggml_fp16_t, 256> scales, mins;
  for (std::size_t i = 0; i < scales.size(); ++i) {
    const float scale = deviation / shape.deviation * (0.75f + static_cast<float>(i) / 512.0f);
    scales[i] = ggml_fp32_to_fp16(scale);
    mins[i] = ggml_fp32_to_fp16(scale * shape.centre);
  }
  for (std::size_t at = 0; at < out.size(); at += shape.bytes) {
    std::byte* block = out.data() + at;
    const auto choice = std::to_integer<std::size_t>(block[shape.scale_at]);
    store_le(block + shape.scale_at, scales[choice]);
    if (shape.min_at) store_le(block + *shape.min_at, mins[choice]);
  }
}

void set_mxfp4_exponents(float deviation, std::span<std::byte> out) {
  KVASIR_CHECK(out.size() % kMxfp4Bytes == 0);
  const int top = 128 + static_cast<int>(std::lround(std::log2(deviation / kMxfp4Deviation)));
  for (std::size_t at = 0; at < out.size(); at += kMxfp4Bytes) {
    const int step = std::to_integer<int>(out[at]) & 1;
    out[at] = static_cast<std::byte>(std::clamp(top - step, 1, 254));
  }
}

// Floats of any layout: the sign and mantissa stay random, the exponent becomes one of four:
// spread 0.88 at top exponent 0.
template <typename Word>
void set_exponents(float deviation, int mantissa_bits, int bias, std::span<std::byte> out) {
  KVASIR_CHECK(out.size() % sizeof(Word) == 0);
  const int top = bias + static_cast<int>(std::lround(std::log2(deviation / 0.88f)));
  const auto mantissa_mask = static_cast<Word>((Word{1} << mantissa_bits) - 1);
  const auto sign_mask = static_cast<Word>(Word{1} << (sizeof(Word) * 8 - 1));
  for (std::size_t at = 0; at < out.size(); at += sizeof(Word)) {
    const auto word = load_le<Word>(out.data() + at);
    const int step = static_cast<int>(word >> mantissa_bits) & 3;
    const auto exponent = static_cast<Word>(std::max(top - step, 1));
    store_le(out.data() + at,
             static_cast<Word>((word & (sign_mask | mantissa_mask)) | static_cast<Word>(exponent << mantissa_bits)));
  }
}

}  // namespace

bool can_synthesize(ggml_type type) {
  return find_shape(type) || type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 ||
      type == GGML_TYPE_MXFP4;
}

void fill_random_weights(ggml_type type, float deviation, std::uint64_t key, std::span<std::byte> out) {
  Rng rng(key);
  fill_bits(rng, out);
  switch (type) {
    case GGML_TYPE_F32: return set_exponents<std::uint32_t>(deviation, 23, 127, out);
    case GGML_TYPE_BF16: return set_exponents<std::uint16_t>(deviation, 7, 127, out);
    case GGML_TYPE_F16: return set_exponents<std::uint16_t>(deviation, 10, 15, out);
    case GGML_TYPE_MXFP4: return set_mxfp4_exponents(deviation, out);
    default: break;
  }
  const BlockShape* shape = find_shape(type);
  KVASIR_CHECK(shape != nullptr);
  set_scales(*shape, deviation, out);
}

void fill_random_f32(float low, float high, std::uint64_t key, std::span<std::byte> out) {
  Rng rng(key);
  for (std::size_t at = 0; at < out.size(); at += sizeof(float)) {
    const float unit = static_cast<float>(rng.next() >> 40) * 0x1p-24f;
    store_le(out.data() + at, low + (high - low) * unit);
  }
}

}  // namespace kvasir::gguf
