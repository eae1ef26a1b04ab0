// An End over Beast, over plain TCP or TLS.
#include "hub/relay/end.h"

#include <netinet/tcp.h>
#include <sys/socket.h>

#include <boost/beast/core.hpp>
#include <boost/beast/websocket.hpp>
#include <boost/beast/websocket/ssl.hpp>
#include <utility>

namespace kvasir::hub {
namespace {

namespace websocket = boost::beast::websocket;

// A machine that vanished without a word is noticed by its kernel's silence, which no long
// computation of a worker can be mistaken for. While it waits, seldom: a phone may sleep.
constexpr int kWaitingIdle_s = 20;
constexpr int kPairedIdle_s = 3;
constexpr int kProbeInterval_s = 2;
constexpr int kProbes = 2;
constexpr int kUnacknowledgedMax_ms = 8'000;

template <typename Stream>
class WebSocketEnd final : public End, public std::enable_shared_from_this<WebSocketEnd<Stream>> {
  using ErrorCode = boost::system::error_code;
  static constexpr auto kQuiet = asio::as_tuple(asio::use_awaitable);

 public:
  explicit WebSocketEnd(Stream stream) : socket_(std::move(stream)) {
    home = socket_.get_executor();
    // Beast's own timers would run on the executor the socket was made with; the relay's
    // watchman stands in for them.
    socket_.set_option(websocket::stream_base::timeout{websocket::stream_base::none(),
                                                       websocket::stream_base::none(), false});
    socket_.set_option(websocket::stream_base::decorator(
        [](websocket::response_type& response) { response.set(boost::beast::http::field::server, "kvasir-hub"); }));
    socket_.auto_fragment(false);
    socket_.read_message_max(0);  // messages are never gathered, so their length costs nothing
    socket_.control_callback([this](websocket::frame_type type, boost::beast::string_view) {
      heard();
      if (type != websocket::frame_type::close) return;
      // The read under way ends only when the peer has closed TCP, too: not waited for long.
      peer_closed_ = true;
      std::int64_t open = 0;
      closing_since_ns.compare_exchange_strong(open, now_ns());
    });
    set_option(SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(IPPROTO_TCP, TCP_KEEPIDLE, kWaitingIdle_s);
    set_option(IPPROTO_TCP, TCP_KEEPINTVL, kProbeInterval_s);
    set_option(IPPROTO_TCP, TCP_KEEPCNT, kProbes);
    set_option(IPPROTO_TCP, TCP_USER_TIMEOUT, kUnacknowledgedMax_ms);
  }

  void watch_closely() override { set_option(IPPROTO_TCP, TCP_KEEPIDLE, kPairedIdle_s); }

  asio::awaitable<ErrorCode> accept(const Request& request) override {
    const auto [error] = co_await socket_.async_accept(request, kQuiet);
    co_return error;
  }

  asio::awaitable<Got> read_some(asio::mutable_buffer into) override {
    reading.store(true, std::memory_order_relaxed);
    const auto [error, n] = co_await socket_.async_read_some(into, kQuiet);
    reading.store(false, std::memory_order_relaxed);
    if (!error) heard();
    co_return Got{error, peer_closed_, n, socket_.is_message_done(), socket_.got_binary()};
  }

  asio::awaitable<ErrorCode> write_some(asio::const_buffer bytes, bool message_done, bool binary) override {
    if (closing_since_ns.load(std::memory_order_relaxed) != 0) co_return asio::error::shut_down;
    writing_since_ns.store(now_ns(), std::memory_order_relaxed);
    socket_.binary(binary);
    const auto [error, n] = co_await socket_.async_write_some(message_done, bytes, kQuiet);
    writing_since_ns.store(0, std::memory_order_relaxed);
    co_return error;
  }

  bool more_is_here() override {
    ErrorCode ignored;
    if constexpr (requires { socket_.next_layer().native_handle(); SSL_pending(socket_.next_layer().native_handle()); })
      if (SSL_pending(socket_.next_layer().native_handle()) > 0) return true;
    return boost::beast::get_lowest_layer(socket_).available(ignored) > 0;
  }

  void ping() override {
    if (std::exchange(pinging_, true)) return;
    socket_.async_ping({}, asio::bind_executor(home, [self = this->shared_from_this()](const ErrorCode&) {
                         self->pinging_ = false;
                       }));
  }

  void close(RelayClose code, std::string reason) override {
    std::int64_t open = 0;
    if (!closing_since_ns.compare_exchange_strong(open, now_ns())) return;
    const websocket::close_reason why(static_cast<websocket::close_code>(code), reason);
    socket_.async_close(why,
                        asio::bind_executor(home, [self = this->shared_from_this()](const ErrorCode&) {
                          self->abort();  // whatever still waits on it ends
                        }));
  }

  void abort() override {
    ErrorCode ignored;
    auto& socket = boost::beast::get_lowest_layer(socket_);
    socket.shutdown(asio::ip::tcp::socket::shutdown_both, ignored);
    socket.cancel(ignored);
  }

 private:
  void set_option(int level, int name, int value) {
    ::setsockopt(boost::beast::get_lowest_layer(socket_).native_handle(), level, name, &value, sizeof value);
  }

  websocket::stream<Stream, /*deflate*/ false> socket_;
  bool pinging_ = false;
  bool peer_closed_ = false;
};

}  // namespace

bool is_websocket_upgrade(const End::Request& request) { return websocket::is_upgrade(request); }

std::shared_ptr<End> make_end(asio::ip::tcp::socket socket) {
  return std::make_shared<WebSocketEnd<asio::ip::tcp::socket>>(std::move(socket));
}

std::shared_ptr<End> make_end(asio::ssl::stream<asio::ip::tcp::socket> stream) {
  return std::make_shared<WebSocketEnd<asio::ssl::stream<asio::ip::tcp::socket>>>(std::move(stream));
}

}  // namespace kvasir::hub
