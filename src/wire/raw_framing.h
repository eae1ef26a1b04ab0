// The older system's framing, which a worker also answers on an unencrypted port. No header,
// no lengths, no layer: one request after another,
//   i32 n_used, i32 n_tokens, f32 cur[n_tokens][n_embd], i32 sel[n_tokens][n_used]
// answered by
//   f32 experts[n_tokens][n_used][n_embd]
// little-endian. Expert ids are local to the slice: the rank of the expert in it. There is no
// way to say what went wrong: the worker closes the connection instead.
//
// A Kvasir frame begins with kMagic, which as n_used is far over any limit, so the first four
// bytes of a connection tell the two apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "wire/messages.h"

namespace kvasir::wire {

inline constexpr std::size_t kRawHeadBytes = 8;
inline constexpr std::uint32_t kRawUsedMax = 1024;                  // n_used
inline constexpr std::uint32_t kRawTokensMax = kExecRowsMax;        // n_tokens
inline constexpr std::uint32_t kRawPairsMax = kExecPairsMax;        // their product
inline constexpr std::uint64_t kRawRequestBytesMax = kFramePayloadBytesMax;

enum class Framing { kKvasir, kRaw };
// Of a connection, from its first bytes; nullopt while there are fewer than four.
std::optional<Framing> detect_framing(ByteSpan first_bytes);

struct RawRequest {
  std::uint32_t n_used = 0;
  std::uint32_t n_tokens = 0;
  std::span<const float> cur;           // n_tokens x n_embd
  std::span<const std::int32_t> sel;    // n_tokens x n_used, each in [0, n_held)
  // What the answer has: n_tokens x n_used rows of n_embd f32.
  std::size_t answer_rows() const { return std::size_t{n_used} * n_tokens; }
};

// Assembles requests from bytes as they come. The layer's width and how many of its experts
// are held are known to the worker and checked here; as in EXEC, no expert may occur twice
// for one token. Memory grows with the bytes that came, not with what the head claims.
class RawParser {
 public:
  RawParser(std::uint32_t n_embd, std::uint32_t n_held) : n_embd_(n_embd), n_held_(n_held) {}

  // Takes bytes of `input` up to the end of the current request and gives how many. When
  // complete() is true afterwards, request() stands until the next call of feed(). Errors
  // are final: the connection must be closed.
  Result<std::size_t> feed(ByteSpan input);
  bool complete() const { return complete_; }
  const RawRequest& request() const { return request_; }
  // Once the head has come: what the whole request takes, and what its answer will.
  bool head_known() const { return taken_ >= kRawHeadBytes; }
  std::uint64_t request_bytes() const { return kRawHeadBytes + cur_bytes_ + sel_bytes_; }
  std::uint64_t answer_bytes() const { return std::uint64_t{request_.n_used} * cur_bytes_; }
  // A request has begun and is not complete: what a caller's deadline watches.
  bool mid_request() const { return !complete_ && taken_ > 0; }

 private:
  Status check_head();
  Status check_selection() const;

  std::uint32_t n_embd_;
  std::uint32_t n_held_;
  std::size_t taken_ = 0;  // bytes of the current request
  bool complete_ = false;
  std::byte head_[kRawHeadBytes] = {};
  std::size_t cur_bytes_ = 0;
  std::size_t sel_bytes_ = 0;
  RawRequest request_;
  std::vector<float> cur_;
  std::vector<std::int32_t> sel_;
};

}  // namespace kvasir::wire
