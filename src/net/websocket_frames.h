// The frames of a WebSocket (RFC 6455, section 5), pure: bytes in, pieces out. Both ends of a
// relayed connection and the relay use it after their handshakes.
//
// A stream of bytes in messages of any length: payloads are handed on piece by piece as they
// arrive and never gathered; only control frames, at most 125 bytes, are kept until whole.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "base/bytes.h"
#include "base/error.h"

namespace kvasir::net::websocket {

enum class Op : std::uint8_t { kContinuation = 0, kText = 1, kBinary = 2, kClose = 8, kPing = 9, kPong = 10 };

// A client's payload travels XORed with these four bytes, over and over; all zero leaves it as it is.
using MaskKey = std::array<std::byte, 4>;

inline constexpr std::size_t kHeaderBytesMax = 14;
inline constexpr std::size_t kControlBytesMax = 125;
inline constexpr std::size_t kReasonBytesMax = kControlBytesMax - 2;

using HeaderBytes = std::array<std::byte, kHeaderBytesMax>;
// A client gives a key, a server none. The bytes of `out` that count.
std::size_t encode_header(HeaderBytes& out, Op op, bool fin, std::uint64_t payload_bytes, const MaskKey* key);

// A whole control frame; a payload past its limit is cut.
Bytes control_frame(Op op, ByteSpan payload, const MaskKey* key);
Bytes close_frame(std::uint16_t code, std::string_view reason, const MaskKey* key);
struct CloseReason {
  std::uint16_t code = 1005;  // no code came
  std::string reason;
};
CloseReason parse_close(ByteSpan payload);

// XORs with the key, of which `at` bytes have been used.
void mask(std::span<std::byte> bytes, const MaskKey& key, std::uint64_t at);

// What a peer sends.
class Parser {
 public:
  enum class From { kClient, kServer };
  explicit Parser(From from) : from_(from) {}

  struct Piece {
    Op op = Op::kBinary;           // of a message's pieces: text or binary
    std::span<std::byte> payload;  // unmasked in place; a control frame's lies in the parser until the next call
    bool message_done = false;     // data: these are the message's last bytes
    bool is_control() const { return op >= Op::kClose; }
  };
  // Consumes from the front of `bytes` up to the next piece; nullopt: more bytes are needed. An
  // empty piece is the end of a message. An error says how the peer broke the rules; final.
  Result<std::optional<Piece>> next(std::span<std::byte>& bytes);

  // Of the data frame under way: bytes of its payload that have not been seen; 0 between frames
  // and inside control frames.
  std::uint64_t payload_left() const { return in_payload_ && !is_control(op_) ? left_ : 0; }
  // …whose bytes need no unmasking, so that somebody may carry them past this parser.
  bool payload_is_bare() const { return from_ == From::kServer || key_ == MaskKey{}; }
  // Of that frame, known with its header.
  bool ends_message() const { return fin_; }
  Op message_op() const { return message_op_; }
  // Somebody has carried so many of them. What passed is the piece's, but for its bytes.
  Piece skip(std::uint64_t bytes);

  std::uint64_t last_payload_bytes() const { return last_payload_bytes_; }  // of the last data frame's header

 private:
  static bool is_control(Op op) { return op >= Op::kClose; }
  Status parse_header();
  std::size_t header_bytes() const;  // as far as its first two bytes tell

  const From from_;
  HeaderBytes header_{};
  std::size_t have_ = 0;  // of the header
  bool in_payload_ = false;
  Op op_ = Op::kBinary, message_op_ = Op::kBinary;
  bool fin_ = false, in_message_ = false;
  std::uint64_t left_ = 0, at_ = 0, last_payload_bytes_ = 0;
  MaskKey key_{};
  std::array<std::byte, kControlBytesMax> control_{};
  std::size_t control_have_ = 0;
};

}  // namespace kvasir::net::websocket
