#include "wire/raw_framing.h"

#include <algorithm>
#include <cstring>
#include <format>

#include "base/check.h"
#include "wire/codec.h"

namespace kvasir::wire {
namespace {

// How far a vector may run ahead of the bytes that fill it.
constexpr std::size_t kGrowthBytes = 256 << 10;

std::unexpected<Error> refuse(std::string_view why) {
  return retry_elsewhere(std::format("the raw request is not valid: {}; drop the connection.", why));
}

// Copies bytes [at, at + input.size()) of an array of `total` bytes, which grows on the way.
template <typename T>
void put_at(std::vector<T>& array, std::size_t at, std::size_t total, ByteSpan input) {
  if (input.empty()) return;  // then neither need lie anywhere
  const std::size_t needed = at + input.size();
  if (needed > array.size() * sizeof(T)) {
    const std::size_t bytes = std::min(total, std::max(needed + kGrowthBytes, 2 * at));
    array.resize((bytes + sizeof(T) - 1) / sizeof(T));
  }
  std::memcpy(reinterpret_cast<std::byte*>(array.data()) + at, input.data(), input.size());
}

}  // namespace

// The magic must never be a count that raw framing allows.
static_assert(kMagic > kRawUsedMax && kMagic < 0x80000000u);

std::optional<Framing> detect_framing(ByteSpan first_bytes) {
  if (first_bytes.size() < sizeof kMagic) return std::nullopt;
  return load_le<std::uint32_t>(first_bytes.data()) == kMagic ? Framing::kKvasir : Framing::kRaw;
}

Status RawParser::check_head() {
  const auto n_used = load_le<std::int32_t>(head_);
  const auto n_tokens = load_le<std::int32_t>(head_ + 4);
  if (n_used < 1 || static_cast<std::uint32_t>(n_used) > kRawUsedMax)
    return refuse(std::format("n_used is {} and must lie in 1..{}", n_used, kRawUsedMax));
  if (n_tokens < 1 || static_cast<std::uint32_t>(n_tokens) > kRawTokensMax)
    return refuse(std::format("n_tokens is {} and must lie in 1..{}", n_tokens, kRawTokensMax));
  // 64 bits hold every product: 2^10 x 2^14 x 2^20 x 4.
  const auto used = static_cast<std::uint64_t>(n_used);
  const auto tokens = static_cast<std::uint64_t>(n_tokens);
  const std::uint64_t cur_bytes = tokens * n_embd_ * sizeof(float);
  const std::uint64_t sel_bytes = tokens * used * sizeof(std::int32_t);
  if (used > n_held_) return refuse(std::format("n_used is {} and this slice holds {} experts", used, n_held_));
  if (used * tokens > kRawPairsMax) return refuse(std::format("it asks for more than {} expert outputs", kRawPairsMax));
  if (kRawHeadBytes + cur_bytes + sel_bytes > kRawRequestBytesMax || used * cur_bytes > kAnswerBytesMax)
    return refuse("it is larger than one request may be; send fewer tokens");
  request_.n_used = static_cast<std::uint32_t>(n_used);
  request_.n_tokens = static_cast<std::uint32_t>(n_tokens);
  cur_bytes_ = cur_bytes;
  sel_bytes_ = sel_bytes;
  return {};
}

Status RawParser::check_selection() const {
  std::vector<std::int32_t> sorted;
  for (std::size_t token = 0; token < request_.n_tokens; ++token) {
    const auto used = request_.sel.subspan(token * request_.n_used, request_.n_used);
    for (const std::int32_t id : used)
      if (id < 0 || static_cast<std::uint32_t>(id) >= n_held_)
        return refuse(std::format("expert {} is asked for and this slice holds 0:{}", id, n_held_));
    sorted.assign(used.begin(), used.end());
    std::ranges::sort(sorted);
    if (std::ranges::adjacent_find(sorted) != sorted.end()) return refuse("a token names the same expert twice");
  }
  return {};
}

Result<std::size_t> RawParser::feed(ByteSpan input) {
  if (complete_) {
    complete_ = false;
    taken_ = 0;
  }
  const std::size_t size_before = input.size();
  if (taken_ < kRawHeadBytes) {
    const ByteSpan piece = input.first(std::min(input.size(), kRawHeadBytes - taken_));
    std::ranges::copy(piece, head_ + taken_);
    taken_ += piece.size();
    input = input.subspan(piece.size());
    if (taken_ < kRawHeadBytes) return size_before;
    KVASIR_TRY(check_head());
  }
  const std::size_t cur_end = kRawHeadBytes + cur_bytes_;
  if (taken_ < cur_end && !input.empty()) {
    const ByteSpan piece = input.first(std::min(input.size(), cur_end - taken_));
    put_at(cur_, taken_ - kRawHeadBytes, cur_bytes_, piece);
    taken_ += piece.size();
    input = input.subspan(piece.size());
  }
  const std::size_t sel_end = cur_end + sel_bytes_;
  if (taken_ >= cur_end && !input.empty()) {
    const ByteSpan piece = input.first(std::min(input.size(), sel_end - taken_));
    put_at(sel_, taken_ - cur_end, sel_bytes_, piece);
    taken_ += piece.size();
    input = input.subspan(piece.size());
  }
  if (taken_ == sel_end) {
    request_.cur = std::span(cur_).first(cur_bytes_ / sizeof(float));
    request_.sel = std::span(sel_).first(sel_bytes_ / sizeof(std::int32_t));
    KVASIR_TRY(check_selection());
    complete_ = true;
  }
  return size_before - input.size();
}

}  // namespace kvasir::wire
