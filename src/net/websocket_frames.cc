#include "net/websocket_frames.h"

#include <algorithm>
#include <cstring>

namespace kvasir::net::websocket {
namespace {

constexpr std::byte kFin{0x80}, kReserved{0x70}, kOpBits{0x0f}, kMasked{0x80}, kLengthBits{0x7f};
constexpr std::uint8_t kLength16 = 126, kLength64 = 127;

void put_be(std::byte* out, std::uint64_t value, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<std::byte>(value >> (8 * (n - 1 - i)));
}
std::uint64_t get_be(const std::byte* in, std::size_t n) {
  std::uint64_t out = 0;
  for (std::size_t i = 0; i < n; ++i) out = out << 8 | static_cast<std::uint64_t>(in[i]);
  return out;
}

std::unexpected<Error> broken(const char* how) {
  return retry_elsewhere(std::string("the WebSocket's rules were broken: ") + how + ".");
}

}  // namespace

std::size_t encode_header(HeaderBytes& out, Op op, bool fin, std::uint64_t payload_bytes, const MaskKey* key) {
  out[0] = static_cast<std::byte>(op) | (fin ? kFin : std::byte{0});
  std::size_t n = 2;
  std::uint8_t length = 0;
  if (payload_bytes < kLength16) {
    length = static_cast<std::uint8_t>(payload_bytes);
  } else if (payload_bytes <= 0xffff) {
    length = kLength16;
    put_be(out.data() + 2, payload_bytes, 2);
    n = 4;
  } else {
    length = kLength64;
    put_be(out.data() + 2, payload_bytes, 8);
    n = 10;
  }
  out[1] = static_cast<std::byte>(length) | (key != nullptr ? kMasked : std::byte{0});
  if (key == nullptr) return n;
  std::ranges::copy(*key, out.begin() + static_cast<std::ptrdiff_t>(n));
  return n + key->size();
}

Bytes control_frame(Op op, ByteSpan payload, const MaskKey* key) {
  payload = payload.first(std::min(payload.size(), kControlBytesMax));
  HeaderBytes header;
  const std::size_t n = encode_header(header, op, true, payload.size(), key);
  Bytes out(header.begin(), header.begin() + static_cast<std::ptrdiff_t>(n));
  out.insert(out.end(), payload.begin(), payload.end());
  if (key != nullptr) mask(std::span(out).subspan(n), *key, 0);
  return out;
}

Bytes close_frame(std::uint16_t code, std::string_view reason, const MaskKey* key) {
  Bytes payload(2);
  put_be(payload.data(), code, 2);
  const ByteSpan text = std::as_bytes(std::span(reason.substr(0, kReasonBytesMax)));
  payload.insert(payload.end(), text.begin(), text.end());
  return control_frame(Op::kClose, payload, key);
}

CloseReason parse_close(ByteSpan payload) {
  CloseReason out;
  if (payload.size() < 2) return out;
  out.code = static_cast<std::uint16_t>(get_be(payload.data(), 2));
  out.reason.assign(reinterpret_cast<const char*>(payload.data()) + 2, payload.size() - 2);
  return out;
}

void mask(std::span<std::byte> bytes, const MaskKey& key, std::uint64_t at) {
  if (key == MaskKey{}) return;
  // Four words at once, as wide as the compiler's vectors; then what is left.
  constexpr std::size_t kWords = 4, kStep = kWords * sizeof(std::uint64_t);
  std::array<std::byte, sizeof(std::uint64_t)> pattern;
  for (std::size_t i = 0; i < pattern.size(); ++i) pattern[i] = key[(at + i) % key.size()];
  std::uint64_t word;
  std::memcpy(&word, pattern.data(), sizeof word);
  std::size_t i = 0;
  for (; i + kStep <= bytes.size(); i += kStep) {
    std::uint64_t words[kWords];
    std::memcpy(words, bytes.data() + i, kStep);
    for (std::uint64_t& each : words) each ^= word;
    std::memcpy(bytes.data() + i, words, kStep);
  }
  for (; i < bytes.size(); ++i) bytes[i] ^= pattern[i % pattern.size()];
}

std::size_t Parser::header_bytes() const {
  if (have_ < 2) return 2;
  const auto length = static_cast<std::uint8_t>(header_[1] & kLengthBits);
  const std::size_t extended = length == kLength16 ? 2 : length == kLength64 ? 8 : 0;
  return 2 + extended + (from_ == From::kClient ? key_.size() : 0);
}

Status Parser::parse_header() {
  const std::byte first = header_[0];
  if ((first & kReserved) != std::byte{0}) return broken("a reserved bit is set");
  const auto op = static_cast<Op>(first & kOpBits);
  fin_ = (first & kFin) != std::byte{0};
  if (((header_[1] & kMasked) != std::byte{0}) != (from_ == From::kClient))
    return broken(from_ == From::kClient ? "a client's frame has no mask" : "a server's frame has a mask");
  const auto length = static_cast<std::uint8_t>(header_[1] & kLengthBits);
  std::size_t at = 2;
  left_ = length;
  if (length >= kLength16) {
    const std::size_t n = length == kLength16 ? 2 : 8;
    left_ = get_be(header_.data() + at, n);
    at += n;
    if (left_ < kLength16 || (n == 8 && (left_ <= 0xffff || left_ >> 63 != 0)))
      return broken("a frame's length is not written as it must be");
  }
  if (from_ == From::kClient) std::copy_n(header_.begin() + static_cast<std::ptrdiff_t>(at), key_.size(), key_.begin());
  at_ = 0;
  op_ = op;
  if (is_control(op)) {
    if (op != Op::kClose && op != Op::kPing && op != Op::kPong) return broken("a frame of an unknown kind");
    if (!fin_ || left_ > kControlBytesMax) return broken("a control frame is too long");
    control_have_ = 0;
    return {};
  }
  if (op == Op::kContinuation) {
    if (!in_message_) return broken("a message goes on that has not begun");
  } else {
    if (op != Op::kText && op != Op::kBinary) return broken("a frame of an unknown kind");
    if (in_message_) return broken("a message begins inside another");
    message_op_ = op;
  }
  in_message_ = !fin_;
  last_payload_bytes_ = left_;
  return {};
}

Parser::Piece Parser::skip(std::uint64_t bytes) {
  left_ -= bytes;
  at_ += bytes;
  if (left_ > 0) return {message_op_, {}, false};
  in_payload_ = false;
  return {message_op_, {}, fin_};
}

Result<std::optional<Parser::Piece>> Parser::next(std::span<std::byte>& bytes) {
  while (true) {
    if (!in_payload_) {
      while (have_ < header_bytes()) {
        if (bytes.empty()) return std::nullopt;
        const std::size_t n = std::min(header_bytes() - have_, bytes.size());
        std::copy_n(bytes.begin(), n, header_.begin() + static_cast<std::ptrdiff_t>(have_));
        bytes = bytes.subspan(n);
        have_ += n;
      }
      have_ = 0;
      KVASIR_TRY(parse_header());
      in_payload_ = true;
      if (left_ == 0 && !is_control(op_)) {
        const Piece piece = skip(0);
        // A frame without bytes that ends nothing says nothing.
        if (piece.message_done) return piece;
        continue;
      }
    }
    if (left_ > 0 && bytes.empty()) return std::nullopt;
    const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(left_, bytes.size()));
    const std::span<std::byte> taken = bytes.first(n);
    bytes = bytes.subspan(n);
    mask(taken, key_, at_);
    if (!is_control(op_)) {
      Piece piece = skip(n);
      piece.payload = taken;
      return piece;
    }
    std::ranges::copy(taken, control_.begin() + static_cast<std::ptrdiff_t>(control_have_));
    control_have_ += n;
    left_ -= n;
    at_ += n;
    if (left_ > 0) return std::nullopt;
    in_payload_ = false;
    return Piece{op_, std::span(control_).first(control_have_), true};
  }
}

}  // namespace kvasir::net::websocket
