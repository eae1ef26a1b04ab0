// An End over plain TCP or TLS. Beast judges and answers the request; the frames are
// net/websocket_frames.h, which hands payloads on as they arrive.
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/beast/core.hpp>
#include <boost/beast/websocket.hpp>
#include <boost/beast/websocket/ssl.hpp>
#include <cerrno>
#include <cstring>
#include <tuple>
#include <utility>

#include "hub/relay/end.h"
#include "hub/relay/relay_splice.h"
#include "net/websocket_frames.h"

namespace kvasir::hub {
namespace {

namespace beast_websocket = boost::beast::websocket;
namespace websocket = net::websocket;
using Tcp = asio::ip::tcp;
using websocket::Op;
using websocket::Parser;

// A machine that vanished without a word is noticed by its kernel's silence, which no long
// computation of a worker can be mistaken for. While it waits, seldom: a phone may sleep.
constexpr int kWaitingIdle_s = 20;
constexpr int kPairedIdle_s = 3;
constexpr int kProbeInterval_s = 2;
constexpr int kProbes = 2;
constexpr int kUnacknowledgedMax_ms = 8'000;
constexpr std::size_t kWaitingBytes = 256;  // room of a socket that waits, perhaps for days
// After a close was sent, for the peer's; the watchman is quicker where somebody reads.
constexpr auto kCloseWait = std::chrono::seconds(2);

template <typename Stream>
class WebSocketEnd final : public End, public std::enable_shared_from_this<WebSocketEnd<Stream>> {
  static constexpr auto kQuiet = asio::as_tuple(asio::use_awaitable);
  static constexpr bool kPlain = std::is_same_v<Stream, Tcp::socket>;

 public:
  explicit WebSocketEnd(Stream stream) : stream_(std::move(stream)), turn_(stream_.get_executor()) {
    home = stream_.get_executor();
    ErrorCode ignored;
    boost::beast::get_lowest_layer(stream_).non_blocking(true, ignored);  // write() tries at once
    set_option(SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(IPPROTO_TCP, TCP_KEEPIDLE, kWaitingIdle_s);
    set_option(IPPROTO_TCP, TCP_KEEPINTVL, kProbeInterval_s);
    set_option(IPPROTO_TCP, TCP_KEEPCNT, kProbes);
    set_option(IPPROTO_TCP, TCP_USER_TIMEOUT, kUnacknowledgedMax_ms);
  }

  void watch_closely() override {
    set_option(IPPROTO_TCP, TCP_KEEPIDLE, kPairedIdle_s);
    paired_ = true;
  }

  void move_to(asio::any_io_executor executor) override {
    auto& socket = boost::beast::get_lowest_layer(stream_);
    const auto context_of = [](const asio::any_io_executor& of) { return &asio::query(of, asio::execution::context); };
    const bool same = context_of(executor) == context_of(socket.get_executor());
    home = executor;
    turn_ = asio::steady_timer(executor);
    if (same) return;
    ErrorCode error;
    const Tcp protocol = socket.local_endpoint(error).protocol();
    const int fd = socket.release(error);
    if (error) return;  // nothing works on it any more; the next operation says so
    Tcp::socket there(executor);
    if (there.assign(protocol, fd, error)) ::close(fd);
    socket = std::move(there);
    socket.non_blocking(true, error);
  }

  asio::awaitable<ErrorCode> accept(const Request& request) override {
    beast_websocket::stream<Stream&, /*deflate*/ false> handshake(stream_);
    // Beast's own timers would run on the executor the socket was made with; the connection's
    // deadline stands in for them.
    handshake.set_option(beast_websocket::stream_base::timeout{beast_websocket::stream_base::none(),
                                                               beast_websocket::stream_base::none(), false});
    handshake.set_option(beast_websocket::stream_base::decorator([](beast_websocket::response_type& response) {
      response.set(boost::beast::http::field::server, "kvasir-hub");
    }));
    const auto [error] = co_await handshake.async_accept(request, kQuiet);
    co_return error;
  }

  // --- reading ---------------------------------------------------------------------------

  asio::awaitable<Got> read_piece(bool before_large) override {
    while (true) {
      if (!unparsed_.empty()) {
        auto next = parser_.next(unparsed_);
        if (!next) co_return Got{.error = asio::error::invalid_argument};
        if (*next) {
          const Parser::Piece& piece = **next;
          if (!piece.is_control()) co_return whole_of(piece);
          heard();
          if (const auto ended = co_await on_control(piece)) co_return *ended;
          continue;
        }
      }
      if (before_large && bare_left() >= kSpliceBytesMin) co_return Got{};  // only its header has been read
      make_room();
      ErrorCode error;
      std::size_t n = 0;
      if constexpr (kPlain) {
        std::tie(error, n) = co_await receive(before_large && parser_.payload_left() == 0);
      } else {
        reading.store(true, std::memory_order_relaxed);
        std::tie(error, n) = co_await stream_.async_read_some(asio::buffer(in_.get(), in_bytes_), kQuiet);
        reading.store(false, std::memory_order_relaxed);
      }
      if (error) co_return Got{.error = error};
      heard();
      unparsed_ = {in_.get(), n};
    }
  }

  // --- writing ---------------------------------------------------------------------------

  asio::awaitable<ErrorCode> write_piece(std::span<const std::byte> payload, bool message_done, bool binary) override {
    if (const ErrorCode failed = co_await take_turn()) co_return failed;
    websocket::HeaderBytes header;
    const std::size_t n = next_header(header, payload.size(), message_done, binary);
    const std::array<asio::const_buffer, 2> parts = {asio::buffer(header.data(), n),
                                                     asio::buffer(payload.data(), payload.size())};
    const ErrorCode error = co_await write(parts);
    end_frame();
    co_return error;
  }

  void ping() override {
    if (busy_ || std::exchange(pinging_, true)) return;
    asio::co_spawn(home,
                   send_control(this->shared_from_this(), websocket::control_frame(Op::kPing, {}, nullptr), &pinging_),
                   asio::detached);
  }

  void close(RelayClose code, std::string reason) override {
    std::int64_t open = 0;
    if (!closing_since_ns.compare_exchange_strong(open, now_ns())) return;
    asio::co_spawn(
        home,
        send_close(this->shared_from_this(), websocket::close_frame(static_cast<std::uint16_t>(code), reason, nullptr)),
        asio::detached);
  }

  void abort() override {
    ErrorCode ignored;
    auto& socket = boost::beast::get_lowest_layer(stream_);
    socket.shutdown(Tcp::socket::shutdown_both, ignored);
    socket.cancel(ignored);
    turn_.cancel();
  }

  // --- bytes that pass by the kernel's hand ------------------------------------------------

  int bare_fd() const override {
    if constexpr (kPlain) return const_cast<Stream&>(stream_).native_handle();
    else return -1;
  }
  std::uint64_t bare_left() const override {
    return kPlain && unparsed_.empty() && parser_.payload_is_bare() ? parser_.payload_left() : 0;
  }
  asio::awaitable<ErrorCode> wait_readable() override {
    reading.store(true, std::memory_order_relaxed);
    const auto [error] = co_await boost::beast::get_lowest_layer(stream_).async_wait(Tcp::socket::wait_read, kQuiet);
    reading.store(false, std::memory_order_relaxed);
    co_return error;
  }
  asio::awaitable<ErrorCode> wait_writable() override {
    const auto [error] = co_await boost::beast::get_lowest_layer(stream_).async_wait(Tcp::socket::wait_write, kQuiet);
    co_return error;
  }
  bool bare_ends_message() const override { return parser_.ends_message(); }
  bool bare_is_binary() const override { return parser_.message_op() != Op::kText; }
  void took_bare(std::uint64_t bytes) override {
    heard();
    parser_.skip(bytes);
  }
  asio::awaitable<ErrorCode> begin_frame(std::uint64_t payload_bytes, bool message_done, bool binary) override {
    if (const ErrorCode failed = co_await take_turn()) co_return failed;
    websocket::HeaderBytes header;
    const std::size_t n = next_header(header, payload_bytes, message_done, binary);
    // One packet with what follows: the peer need not wake up for a header.
    for (std::size_t at = 0; at < n;) {
      const ssize_t sent = ::send(bare_fd(), header.data() + at, n - at, MSG_MORE | MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent >= 0) {
        at += static_cast<std::size_t>(sent);
        continue;
      }
      ErrorCode error(errno, boost::system::system_category());
      if (errno == EAGAIN) error = co_await wait_writable();
      if (error && errno != EINTR) {
        end_frame();
        co_return error;
      }
    }
    co_return ErrorCode{};
  }
  void end_frame() override {
    writing_since_ns.store(0, std::memory_order_relaxed);
    busy_ = false;
    turn_.cancel();
  }

 private:
  void set_option(int level, int name, int value) {
    ::setsockopt(boost::beast::get_lowest_layer(stream_).native_handle(), level, name, &value, sizeof value);
  }

  // At once where there is something, without a turn through the executor. Where much is there between
  // frames, perhaps a large one, only a header is taken.
  asio::awaitable<std::tuple<ErrorCode, std::size_t>> receive(bool before_large) {
    for (bool waited = false;; waited = true) {
      const std::size_t unread = before_large ? unread_bytes() : 0;
      if (!before_large || unread > 0 || waited) {
        const std::size_t room = unread >= kSpliceBytesMin ? websocket::kHeaderBytesMax : in_bytes_;
        const ssize_t n = ::recv(bare_fd(), in_.get(), room, MSG_DONTWAIT);
        if (n > 0) co_return std::tuple(ErrorCode{}, static_cast<std::size_t>(n));
        if (n == 0) co_return std::tuple(ErrorCode(asio::error::eof), std::size_t{0});
        if (errno != EAGAIN && errno != EINTR)
          co_return std::tuple(ErrorCode(errno, boost::system::system_category()), std::size_t{0});
      }
      if (const ErrorCode error = co_await wait_readable()) co_return std::tuple(error, std::size_t{0});
    }
  }

  std::size_t unread_bytes() {
    int n = 0;
    return ::ioctl(bare_fd(), FIONREAD, &n) == 0 && n > 0 ? static_cast<std::size_t>(n) : 0;
  }

  // A socket that waits has little room; the first read of a pair makes more.
  void make_room() {
    const std::size_t wanted = paired_ ? kRelayChunkBytes : kWaitingBytes;
    if (in_bytes_ >= wanted) return;
    in_ = std::make_unique_for_overwrite<std::byte[]>(wanted);
    in_bytes_ = wanted;
  }

  // With what of the same frame is in the socket already: fewer, larger pieces.
  Got whole_of(const Parser::Piece& piece) {
    Got got{.error = {}, .payload = piece.payload, .message_done = piece.message_done, .binary = piece.op != Op::kText};
    if constexpr (kPlain) {
      while (unparsed_.empty() && parser_.payload_left() > 0 &&
             !(parser_.payload_is_bare() && parser_.payload_left() >= kSpliceBytesMin)) {
        std::byte* const end = got.payload.data() + got.payload.size();
        const std::size_t room = in_bytes_ - static_cast<std::size_t>(end - in_.get());
        const ssize_t n = ::recv(bare_fd(), end, std::min<std::uint64_t>(room, parser_.payload_left()), MSG_DONTWAIT);
        if (n <= 0) break;  // what is wrong the next read says, too
        std::span<std::byte> more(end, static_cast<std::size_t>(n));
        const auto next = parser_.next(more);
        got.payload = {got.payload.data(), got.payload.size() + (*next)->payload.size()};
        got.message_done = (*next)->message_done;
      }
    }
    return got;
  }

  // A Got where this was the last frame.
  asio::awaitable<std::optional<Got>> on_control(const Parser::Piece& piece) {
    if (piece.op == Op::kPing && !std::exchange(ponging_, true)) {
      asio::co_spawn(home,
                     send_control(this->shared_from_this(), websocket::control_frame(Op::kPong, piece.payload, nullptr),
                                  &ponging_),
                     asio::detached);
    }
    if (piece.op != Op::kClose) co_return std::nullopt;
    peer_closed_ = true;
    std::int64_t open = 0;
    if (closing_since_ns.compare_exchange_strong(open, now_ns())) {
      const websocket::CloseReason reason = websocket::parse_close(piece.payload);
      co_await send_control(this->shared_from_this(),
                            websocket::close_frame(reason.code == 1005 ? 1000 : reason.code, {}, nullptr), nullptr);
    } else {
      turn_.cancel();  // its answer to our close, which waits for it
    }
    co_return Got{.error = asio::error::eof, .closed_in_order = true};
  }

  // A frame's bytes leave together: writers take turns. An error once it closes.
  asio::awaitable<ErrorCode> take_turn(bool last_words = false) {
    const auto closes = [&] { return !last_words && closing_since_ns.load(std::memory_order_relaxed) != 0; };
    while (busy_ && !closes()) {
      turn_.expires_at(std::chrono::steady_clock::time_point::max());
      co_await turn_.async_wait(kQuiet);
    }
    if (closes()) co_return asio::error::shut_down;
    busy_ = true;
    writing_since_ns.store(now_ns(), std::memory_order_relaxed);
    co_return ErrorCode{};
  }

  // The limits of messages are kept: an older client may take one for a whole answer.
  std::size_t next_header(websocket::HeaderBytes& out, std::uint64_t payload_bytes, bool message_done, bool binary) {
    const Op op = std::exchange(in_message_, !message_done) ? Op::kContinuation : binary ? Op::kBinary : Op::kText;
    return websocket::encode_header(out, op, message_done, payload_bytes, nullptr);
  }

  template <typename Buffers>
  asio::awaitable<ErrorCode> write(const Buffers& buffers) {
    if constexpr (!kPlain) {
      const auto [error, n] = co_await asio::async_write(stream_, buffers, kQuiet);
      co_return error;
    } else {
      // At once where the socket has room, without a turn through the executor.
      boost::beast::buffers_suffix<Buffers> left(buffers);
      while (boost::beast::buffer_bytes(left) > 0) {
        ErrorCode error;
        left.consume(stream_.write_some(left, error));
        if (error == asio::error::would_block) error = co_await wait_writable();
        if (error) co_return error;
      }
      co_return ErrorCode{};
    }
  }

  static asio::awaitable<void> send_control(std::shared_ptr<WebSocketEnd> self, kvasir::Bytes frame, bool* under_way) {
    // A close is the last word, whoever says it; everything else is dropped once there is one.
    const bool is_close = (frame[0] & std::byte{0x0f}) == static_cast<std::byte>(Op::kClose);
    if (!co_await self->take_turn(is_close)) {
      co_await self->write(asio::buffer(frame));
      self->end_frame();
    }
    if (under_way != nullptr) *under_way = false;
  }

  static asio::awaitable<void> send_close(std::shared_ptr<WebSocketEnd> self, kvasir::Bytes frame) {
    co_await send_control(self, std::move(frame), nullptr);
    const TimePoint until = monotonic_now() + kCloseWait;
    while (!self->peer_closed_ && monotonic_now() < until) {
      asio::steady_timer timer(co_await asio::this_coro::executor, std::chrono::milliseconds(20));
      co_await timer.async_wait(kQuiet);
    }
    self->abort();  // whatever still waits on it ends
  }

  Stream stream_;
  Parser parser_{Parser::From::kClient};
  std::unique_ptr<std::byte[]> in_;
  std::size_t in_bytes_ = 0;
  std::span<std::byte> unparsed_;  // in `in_`
  asio::steady_timer turn_;        // cancelled whenever a writer has ended
  bool busy_ = false;              // a writer is under way
  bool in_message_ = false;        // what was written last is not a message's end
  bool paired_ = false, pinging_ = false, ponging_ = false, peer_closed_ = false;
};

}  // namespace

bool is_websocket_upgrade(const End::Request& request) { return beast_websocket::is_upgrade(request); }

std::shared_ptr<End> make_end(Tcp::socket socket) {
  return std::make_shared<WebSocketEnd<Tcp::socket>>(std::move(socket));
}

std::shared_ptr<End> make_end(asio::ssl::stream<Tcp::socket> stream) {
  return std::make_shared<WebSocketEnd<asio::ssl::stream<Tcp::socket>>>(std::move(stream));
}

}  // namespace kvasir::hub
