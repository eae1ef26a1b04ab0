// A WebSocket over any stream: the handshakes by Beast's HTTP parser, the frames by
// websocket_frames.h. Whoever reads or writes moves it on; it owns no thread and no event loop.
//
// What a writer gives leaves from its memory, behind a header of ours, unless it must be masked;
// what a reader asks for is received into its memory. A relayed connection costs its ends no
// pass over the bytes that a direct one would not (docs/decisions/0005-relay-frames.md).

#include "net/websocket.h"

#include <openssl/rand.h>
#include <poll.h>

#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <cstring>
#include <format>
#include <optional>
#include <vector>

#include "base/bytes.h"
#include "net/openssl_error.h"
#include "net/tls.h"
#include "net/websocket_frames.h"
#include "net/websocket_handshake.h"

namespace kvasir::net {

namespace http = boost::beast::http;
using websocket::Op;
using websocket::Parser;

namespace {

constexpr std::size_t kAnswerBytesMax = 8192;    // of a proxy or hub, before the WebSocket
constexpr std::size_t kMaskedBytes = 128 << 10;  // masked at once
constexpr std::size_t kPartsMax = 16;            // written at once
// Past this, a frame's header is received by a call of its own, and the payload where it belongs.
constexpr std::size_t kApartBytes = 32 << 10;
constexpr std::size_t kLookBytes = 64;  // received by somebody who only looks
constexpr websocket::MaskKey kNoMask{};

}  // namespace

struct RelayDialer::Plan {
  RelayUrl url;
  std::optional<HttpProxy> proxy;
  std::string token;
  std::optional<TlsContext> tls;  // of https
};

class RelayedStream final : public WebSocketStream {
  using Plan = RelayDialer::Plan;
  using Payload = RelayDialer::Payload;

 public:
  RelayedStream(Fd fd, std::shared_ptr<const Plan> plan, std::string_view session, Payload payload)
      : WebSocketStream(Fd()),
        plan_(std::move(plan)),
        target_("/api/expert-relay?session=" + websocket::url_encoded(session)),
        masks_(payload == Payload::kAnyBytes),
        lower_(make_plain_stream(std::move(fd))) {
    if (plan_->proxy) ask_proxy();
    else ask_hub();
  }

  Result<bool> is_open() override {
    KVASIR_TRY(turn());
    return phase_ == Phase::kOpen;
  }

  const std::string& moved_to() const override { return moved_to_; }

  Result<bool> has_input() override {
    KVASIR_TRY(turn());
    while (phase_ == Phase::kOpen && early_at_ == early_.size()) {
      std::array<std::byte, kLookBytes> some;
      KVASIR_ASSIGN(const std::size_t n, receive(some));
      early_.assign(some.begin(), some.begin() + static_cast<std::ptrdiff_t>(n));
      early_at_ = 0;
      if (n == 0) break;
    }
    if (ended_) return retry_later("the relay has closed the connection.");
    return early_at_ < early_.size();
  }

  Result<IoResult> read_some(std::span<std::byte> into) override {
    KVASIR_TRY(turn());
    if (phase_ != Phase::kOpen) return IoResult{IoState::kWouldBlock, 0};
    std::size_t n = 0;
    if (early_at_ < early_.size()) {
      n = std::min(into.size(), early_.size() - early_at_);
      std::copy_n(early_.begin() + static_cast<std::ptrdiff_t>(early_at_), n, into.begin());
      early_at_ += n;
    } else {
      KVASIR_ASSIGN(n, receive(into));
    }
    if (n > 0) return IoResult{IoState::kDone, n};
    return IoResult{ended_ ? IoState::kEnd : IoState::kWouldBlock, 0};
  }

  Result<IoResult> write_some(std::span<const iovec> parts) override {
    KVASIR_TRY(turn());
    if (phase_ != Phase::kOpen) return IoResult{IoState::kWouldBlock, 0};
    if (ended_) return retry_elsewhere("the relay has closed the connection.");
    KVASIR_ASSIGN(const bool flushed, flush());
    std::size_t size = 0;
    for (const iovec& part : parts.first(std::min(parts.size(), kPartsMax))) size += part.iov_len;
    if (size == 0) return IoResult{IoState::kDone, 0};
    if (!flushed || closing_) return IoResult{IoState::kWouldBlock, 0};
    return masks_ ? write_masked(parts, size) : write_bare(parts, size);
  }

  void expect_to_write(std::size_t bytes) override { expected_ = bytes; }

  short wants(bool reading) const override {
    // Until it is open there are answers to wait for, whatever the caller does.
    return static_cast<short>(lower_->wants(reading || phase_ != Phase::kOpen) | (own_output() ? POLLOUT : 0));
  }
  bool buffered_input() const override { return early_at_ < early_.size() || lower_->buffered_input(); }
  bool buffered_output() const override { return own_output() || lower_->buffered_output(); }
  bool encrypted() const override { return plan_->url.encrypted; }
  int fd() const override { return lower_->fd(); }

  void shutdown() override {
    if (phase_ != Phase::kOpen || error_ || ended_ || std::exchange(closing_, true)) return;
    // Inside a frame there is no room for the word; the relay sees the connection end.
    if (frame_left_ > 0) return lower_->shutdown();
    append(websocket::close_frame(1000, {}, &kNoMask));
    static_cast<void>(flush());  // best effort: the relay may be gone
  }

 private:
  enum class Phase { kProxy, kHub, kOpen };

  // --- before it is open -----------------------------------------------------------------

  void append(ByteSpan bytes) { out_.insert(out_.end(), bytes.begin(), bytes.end()); }
  void append(std::string_view text) { append(std::as_bytes(std::span(text))); }

  void ask_proxy() {
    const std::string authority = format_host_port(plan_->url.where);
    append(websocket::connect_request(authority, plan_->proxy->credentials));
    phase_ = Phase::kProxy;
    expect_answer();
    answer_->skip(true);  // an answer to CONNECT has no body
  }

  void ask_hub() {
    phase_ = Phase::kHub;
    if (plan_->tls) {
      auto tls = make_tls_client_stream(std::move(lower_), *plan_->tls, plan_->url.where.host);
      if (!tls) {
        lower_ = make_plain_stream(Fd());
        error_ = tls.error();
        return;
      }
      lower_ = *std::move(tls);
    }
    key_ = websocket::make_key();
    append(websocket::upgrade_request(target_, format_host_port(plan_->url.where), key_, plan_->token));
    expect_answer();
  }

  void expect_answer() {
    answer_.emplace();
    answer_->header_limit(kAnswerBytesMax);
    answer_->body_limit(kAnswerBytesMax);
  }

  // Everything that can be done without waiting; the error, once there is one.
  Status turn() {
    while (!error_ && phase_ != Phase::kOpen) {
      const Result<bool> more = step();
      if (!more) error_ = more.error();
      else if (!*more) break;
    }
    if (error_) return std::unexpected(*error_);
    return {};
  }

  // A step towards an open WebSocket; false: the peer's turn.
  Result<bool> step() {
    const std::string name = phase_ == Phase::kProxy ? "proxy " + format_host_port(plan_->proxy->where)
                                                     : "relay '" + plan_->url.where.host + "'";
    const auto broke = [&](const Error& error) {
      if (error.action == ErrorAction::kFixInput)
        return std::unexpected(Error{error.action, "the relay " + error.message});
      return std::unexpected(Error{ErrorAction::kRetryElsewhere,
                                   std::format("the {} did not open the connection: {}", name, error.message)});
    };
    if (const Result<bool> sent = flush(); !sent) return broke(sent.error());
    else if (!*sent) return false;
    std::array<std::byte, 1024> some;
    const Result<IoResult> got = lower_->read_some(some);
    if (!got) return broke(got.error());
    if (got->state == IoState::kWouldBlock) return false;
    boost::system::error_code error;
    if (got->state == IoState::kEnd) {
      if (answer_->got_some()) answer_->put_eof(error);  // an end before the first byte is no message to it
      if (!answer_->is_done()) return broke(Error{ErrorAction::kRetryElsewhere, "it closed it."});
    } else {
      unparsed_.append(reinterpret_cast<const char*>(some.data()), got->bytes);
      while (!unparsed_.empty() && !error && !answer_->is_done()) {
        const std::size_t n = answer_->put(boost::asio::buffer(unparsed_), error);
        unparsed_.erase(0, n);
        if (n == 0) break;
      }
      if (error == http::error::need_more) error = {};
      if (error || unparsed_.size() > kAnswerBytesMax)
        return broke(Error{ErrorAction::kRetryElsewhere, "what it says is not HTTP."});
      if (!answer_->is_done()) return true;
    }
    return on_answer(name);
  }

  Result<bool> on_answer(const std::string& name) {
    const http::response<http::string_body>& answer = answer_->get();
    const unsigned status = answer.result_int();
    if (phase_ == Phase::kProxy) {
      if (status != 200)
        return std::unexpected(Error{status == 407 ? ErrorAction::kFixInput : ErrorAction::kRetryLater,
                                     std::format("the {} refuses to connect to {}: status {}.", name,
                                                 format_host_port(plan_->url.where), status)});
      if (!unparsed_.empty()) return retry_elsewhere(std::format("the {} speaks before it is asked.", name));
      ask_hub();
      if (error_) return std::unexpected(*error_);
      return true;
    }
    if (status == static_cast<unsigned>(http::status::temporary_redirect)) {
      const std::string where = answer[http::field::location];
      const std::size_t end = where.find("/api/");
      if (end != std::string::npos && parse_relay_url(where.substr(0, end))) moved_to_ = where.substr(0, end);
      return retry_later("the relay says: " + websocket::sentence_of(answer.body()));
    }
    if (status != static_cast<unsigned>(http::status::switching_protocols))
      return std::unexpected(websocket::refused_by(status, answer.body()));
    if (answer[http::field::sec_websocket_accept] != websocket::accept_of(key_))
      return retry_elsewhere(std::format("the {} did not open the connection: it does not speak WebSocket.", name));
    phase_ = Phase::kOpen;
    answer_.reset();
    // Frames may have come along with the answer.
    const auto unparsed = std::as_bytes(std::span(unparsed_));
    Bytes frames(unparsed.begin(), unparsed.end());
    unparsed_.clear();
    KVASIR_ASSIGN(const std::size_t n, take_frames(frames));
    early_.assign(frames.begin(), frames.begin() + static_cast<std::ptrdiff_t>(n));
    return true;
  }

  // --- reading ---------------------------------------------------------------------------

  // Payload bytes at the front of `into`; 0: none for now, or the end.
  Result<std::size_t> receive(std::span<std::byte> into) {
    while (!ended_) {
      // Inside a frame no further than its end: the next header would only be in the way.
      std::span<std::byte> room = into;
      if (parser_.payload_left() > 0) room = room.first(std::min<std::uint64_t>(room.size(), parser_.payload_left()));
      else if (parser_.last_payload_bytes() >= kApartBytes)
        room = room.first(std::min(room.size(), kServerHeaderBytes));
      const Result<IoResult> got = lower_->read_some(room);
      if (!got) return lost(got.error().message);
      if (got->state == IoState::kWouldBlock) break;
      if (got->state == IoState::kEnd) {
        if (!closing_) return lost("it ended.");
        ended_ = true;
        break;
      }
      KVASIR_ASSIGN(const std::size_t n, take_frames(room.first(got->bytes)));
      if (n > 0) return n;
    }
    return 0;
  }

  // Moves payloads to the front, answers what wants an answer.
  Result<std::size_t> take_frames(std::span<std::byte> bytes) {
    std::byte* const front = bytes.data();
    std::size_t n = 0;
    while (!ended_) {
      auto piece = parser_.next(bytes);
      if (!piece) return std::unexpected(*(error_ = piece.error()));
      if (!*piece) break;
      if ((*piece)->is_control()) {
        KVASIR_TRY(on_control(**piece));
        continue;
      }
      const std::span<std::byte> payload = (*piece)->payload;
      if (payload.empty()) continue;  // it may lie nowhere
      if (payload.data() != front + n) std::memmove(front + n, payload.data(), payload.size());
      n += payload.size();
    }
    return n;
  }

  Status on_control(const Parser::Piece& piece) {
    if (piece.op == Op::kPing) {
      if (!closing_) after_frame(websocket::control_frame(Op::kPong, piece.payload, &kNoMask));
      return flush_quietly();
    }
    if (piece.op != Op::kClose) return {};
    const websocket::CloseReason reason = websocket::parse_close(piece.payload);
    if (!std::exchange(closing_, true)) {
      after_frame(websocket::close_frame(reason.code == 1005 ? 1000 : reason.code, {}, &kNoMask));
      static_cast<void>(flush());  // the relay knows already
      if (reason.code != 1000 && reason.code != 1005)
        return std::unexpected(
            *(error_ = Error{ErrorAction::kRetryElsewhere,
                             std::format("the relay has closed the connection: {}.", plain(reason.reason))}));
    }
    ended_ = true;
    return {};
  }

  static std::string plain(std::string text) {
    std::erase_if(text, [](unsigned char c) { return c < 0x20 || c == 0x7f; });
    return text;
  }

  std::unexpected<Error> lost(const std::string& why) {
    error_ = Error{ErrorAction::kRetryElsewhere, std::format("the connection to the relay was lost: {}", why)};
    return std::unexpected(*error_);
  }

  // --- writing ---------------------------------------------------------------------------

  bool own_output() const { return out_at_ < out_.size(); }

  // A control frame goes between frames of data.
  void after_frame(ByteSpan frame) {
    if (frame_left_ == 0) append(frame);
    else controls_.insert(controls_.end(), frame.begin(), frame.end());
  }

  // Sends what is ours: true when none of it is left.
  Result<bool> flush() {
    while (own_output()) {
      const iovec rest{out_.data() + out_at_, out_.size() - out_at_};
      const Result<IoResult> sent = lower_->write_some({&rest, 1});
      if (!sent) {
        if (phase_ != Phase::kOpen) return std::unexpected(sent.error());
        return lost(sent.error().message);
      }
      if (sent->state != IoState::kDone) return false;
      out_at_ += sent->bytes;
    }
    out_.clear();
    out_at_ = 0;
    if (lower_->buffered_output()) KVASIR_TRY(lower_->write_some({}));
    return true;
  }
  Status flush_quietly() {
    KVASIR_TRY(flush());
    return {};
  }

  // A frame's header from our memory, its payload from the caller's. It is as long as what the caller
  // expects to write, so that the relay has one frame to carry and not many; where the guess was wrong
  // the next bytes fill it. What the socket does not take the caller gives again.
  Result<IoResult> write_bare(std::span<const iovec> parts, std::size_t size) {
    std::array<iovec, kPartsMax + 1> all;
    std::size_t n = 0, header = 0;
    if (frame_left_ == 0) {
      frame_left_ = std::max(size, expected_);
      header = websocket::encode_header(header_, Op::kBinary, true, frame_left_, &kNoMask);
      all[n++] = {header_.data(), header};
    }
    std::size_t left = frame_left_;
    for (std::size_t i = 0; i < std::min(parts.size(), kPartsMax) && left > 0; ++i) {
      const std::size_t taken = std::min(left, parts[i].iov_len);
      all[n++] = {parts[i].iov_base, taken};
      left -= taken;
    }
    const Result<IoResult> sent = lower_->write_some(std::span(all).first(n));
    if (!sent) return lost(sent.error().message);
    const std::size_t bytes = sent->state == IoState::kDone ? sent->bytes : 0;
    if (bytes == 0) {
      if (header > 0) frame_left_ = 0;  // nothing of it has left: the next one may be another
      return IoResult{IoState::kWouldBlock, 0};
    }
    expected_ = 0;  // a guess is good for what follows it, and never for another frame
    if (bytes < header) append(ByteSpan(header_).subspan(bytes, header - bytes));
    const std::size_t payload = bytes - std::min(bytes, header);
    frame_left_ -= payload;
    if (frame_left_ == 0 && !controls_.empty()) {
      append(std::exchange(controls_, {}));
      KVASIR_TRY(flush());
    }
    return payload > 0 ? IoResult{IoState::kDone, payload} : IoResult{IoState::kWouldBlock, 0};
  }

  Result<IoResult> write_masked(std::span<const iovec> parts, std::size_t size) {
    size = std::min(size, kMaskedBytes);
    websocket::MaskKey key;
    RAND_bytes(reinterpret_cast<unsigned char*>(key.data()), key.size());
    const std::size_t header = websocket::encode_header(header_, Op::kBinary, true, size, &key);
    append(ByteSpan(header_).first(header));
    const std::size_t begin = out_.size();
    for (const iovec& part : parts) {
      const std::size_t n = std::min(part.iov_len, size - (out_.size() - begin));
      append(ByteSpan(static_cast<const std::byte*>(part.iov_base), n));
    }
    websocket::mask(std::span(out_).subspan(begin), key, 0);
    KVASIR_TRY(flush());
    return IoResult{IoState::kDone, size};
  }

  static constexpr std::size_t kServerHeaderBytes = 10;  // of a frame past 64 KiB

  const std::shared_ptr<const Plan> plan_;
  const std::string target_;
  const bool masks_;
  std::unique_ptr<Stream> lower_;
  Phase phase_ = Phase::kHub;
  std::string key_;
  std::optional<http::response_parser<http::string_body>> answer_;
  std::string unparsed_;  // of the answer
  Parser parser_{Parser::From::kServer};
  Bytes early_;  // payload that came before anybody asked for it
  std::size_t early_at_ = 0;
  Bytes out_;  // ours, not sent yet from out_at_ on
  std::size_t out_at_ = 0;
  websocket::HeaderBytes header_{};
  std::uint64_t frame_left_ = 0;  // of a bare frame's payload
  std::size_t expected_ = 0;      // that the caller will write
  Bytes controls_;                // that wait for its end
  std::string moved_to_;
  bool closing_ = false, ended_ = false;
  std::optional<Error> error_;
};

Result<RelayDialer> RelayDialer::create(const RelayOptions& options) {
  auto plan = std::make_shared<Plan>();
  KVASIR_ASSIGN(plan->url, parse_relay_url(options.url));
  if (options.token.empty()) return fix_input("a relay wants a node token of its hub; set KVASIR_TOKEN.");
  if (options.token.find_first_of(" \r\n\t") != std::string::npos)
    return fix_input("the token has spaces or line breaks in it.");
  plan->token = options.token;
  if (plan->url.encrypted) {
    KVASIR_ASSIGN(plan->proxy, proxy_from_environment(plan->url.where.host));
    KVASIR_ASSIGN(plan->tls, TlsContext::client_by_authorities(options.ca_file));
  }
  return RelayDialer(std::move(plan));
}

Result<RelayDialer> RelayDialer::at(const std::string& url) const {
  auto plan = std::make_shared<Plan>(*plan_);
  KVASIR_ASSIGN(plan->url, parse_relay_url(url));
  if (plan_->url.encrypted && !plan->url.encrypted)
    return fix_input("a relay sends its clients to one without encryption.");
  plan->proxy.reset();
  if (plan->url.encrypted) {
    KVASIR_ASSIGN(plan->proxy, proxy_from_environment(plan->url.where.host));
    if (!plan->tls) return fix_input("a relay on this machine sends its clients to one that is not.");
  }
  return RelayDialer(std::move(plan));
}

const HostPort& RelayDialer::dial_address() const { return plan_->proxy ? plan_->proxy->where : plan_->url.where; }

bool RelayDialer::through_proxy() const { return plan_->proxy.has_value(); }

Result<std::unique_ptr<WebSocketStream>> RelayDialer::open(Fd fd, std::string_view session, Payload payload) const {
  return std::make_unique<RelayedStream>(std::move(fd), plan_, session, payload);
}

}  // namespace kvasir::net
