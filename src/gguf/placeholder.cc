#include "gguf/placeholder.h"

#include <algorithm>

#include "gguf/blake3_hasher.h"

namespace kvasir::gguf {
namespace {

constexpr std::string_view kMagic = "KVASIRPH";
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kChecksumBytes = 8;
constexpr std::size_t kCheckedBytes = kPlaceholderBytes - kChecksumBytes;

Hash checksum(ByteSpan placeholder) {
  Blake3 hash;
  hash.update(placeholder.first(kCheckedBytes));
  return hash.finish();
}

// Types that hold weights; the others are integers or what ggml makes of activations.
bool is_weight_type(ggml_type type) {
  return ggml_is_quantized(type) ? type != GGML_TYPE_Q8_1 && type != GGML_TYPE_Q8_K
                                 : type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

}  // namespace

std::array<std::byte, kPlaceholderBytes> encode_placeholder(const Placeholder& placeholder) {
  Bytes bytes;
  ByteWriter out(bytes);
  out.put_bytes(kMagic);
  out.put(kVersion);
  out.put(static_cast<std::uint32_t>(placeholder.type));
  out.put_bytes(placeholder.layer_id);
  out.put(placeholder.nbytes);
  out.put_bytes(ByteSpan(checksum(bytes)).first(kChecksumBytes));
  std::array<std::byte, kPlaceholderBytes> block;
  std::ranges::copy(bytes, block.begin());
  return block;
}

std::optional<Placeholder> decode_placeholder(ByteSpan bytes) {
  if (bytes.size() < kPlaceholderBytes) return std::nullopt;
  bytes = bytes.first(kPlaceholderBytes);
  ByteCursor in(bytes);
  if (!std::ranges::equal(in.get_bytes(kMagic.size()), std::as_bytes(std::span(kMagic)))) return std::nullopt;
  if (in.get<std::uint32_t>() != kVersion) return std::nullopt;
  const auto type = type_from_number(in.get<std::uint32_t>());
  Placeholder out;
  std::ranges::copy(in.get_bytes(out.layer_id.size()), out.layer_id.begin());
  out.nbytes = in.get<std::uint64_t>();
  const Hash expected = checksum(bytes);
  if (!type || !std::ranges::equal(in.get_bytes(kChecksumBytes), ByteSpan(expected).first(kChecksumBytes)))
    return std::nullopt;
  out.type = *type;
  return out;
}

std::optional<ggml_type> placeholder_type(const Shape& ne) {
  std::optional<ggml_type> best;
  std::uint64_t best_bytes = UINT64_MAX;
  for (std::uint32_t i = 0; i < GGML_TYPE_COUNT; ++i) {
    const auto type = type_from_number(i);
    if (!type || !is_weight_type(*type)) continue;
    const auto bytes = tensor_bytes(*type, ne);
    if (!bytes || *bytes < kPlaceholderBytes || *bytes >= best_bytes) continue;
    best = type;
    best_bytes = *bytes;
  }
  return best;
}

}  // namespace kvasir::gguf
