// One WebSocket at the relay: a worker's or a backbone's. All its operations run on one
// executor: its own while it waits, and its worker's once it belongs to a pair, so that a
// pair needs no lock and no hop between threads.
#pragma once

#include <atomic>
#include <boost/asio.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/string_body.hpp>
#include <memory>
#include <string>

#include "base/clock.h"

namespace kvasir::hub {

namespace asio = boost::asio;

// Why a WebSocket is closed, as close codes that both ends can tell apart.
enum class RelayClose : std::uint16_t {
  kDone = 1000,      // the other end has closed its connection in order
  kPolicy = 1008,    // it sent before anybody listened
  kRestart = 1012,   // the relay stops; dial again
  kReplaced = 4409,  // a newer socket of the same worker waits instead
  kGone = 4410,      // the other end has vanished
  kStalled = 4411,   // the other end takes no bytes
  kIdle = 4412,      // no bytes for a long time
};

class End {
 public:
  struct Got {
    boost::system::error_code error;
    bool closed_in_order = false;  // of an error: a close by the rules of WebSocket
    std::size_t bytes = 0;
    bool message_done = false;
    bool binary = true;
  };

  using Request = boost::beast::http::request<boost::beast::http::string_body>;

  virtual ~End() = default;
  // The answer 101; the request has been judged already.
  virtual asio::awaitable<boost::system::error_code> accept(const Request& request) = 0;
  // At least one byte, or the end of a message, or an error.
  virtual asio::awaitable<Got> read_some(asio::mutable_buffer into) = 0;
  virtual asio::awaitable<boost::system::error_code> write_some(asio::const_buffer bytes, bool message_done,
                                                                bool binary) = 0;
  // Belongs to a pair from now on: a peer that vanishes is to be noticed within seconds.
  virtual void watch_closely() = 0;
  // Another read would not have to wait.
  virtual bool more_is_here() = 0;
  // Begin at once and end by themselves; on `home`.
  virtual void ping() = 0;
  virtual void close(RelayClose code, std::string reason) = 0;
  virtual void abort() = 0;  // shuts the socket down: every operation fails

  // Where its operations run; changes once, before the first operation of a pair.
  asio::any_io_executor home;

  // For the watchman, who looks from another thread.
  std::atomic<std::int64_t> heard_ns{now_ns()};   // bytes, a ping or a pong
  std::atomic<std::int64_t> writing_since_ns{0};  // 0: no write waits
  std::atomic<std::int64_t> closing_since_ns{0};  // 0: open
  std::atomic<bool> reading{false};

  static std::int64_t now_ns() { return monotonic_now().time_since_epoch().count(); }
  void heard() { heard_ns.store(now_ns(), std::memory_order_relaxed); }
};

// Is it the request that begins a WebSocket?
bool is_websocket_upgrade(const End::Request& request);

std::shared_ptr<End> make_end(asio::ip::tcp::socket socket);
std::shared_ptr<End> make_end(asio::ssl::stream<asio::ip::tcp::socket> stream);

}  // namespace kvasir::hub
