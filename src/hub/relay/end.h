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
#include <span>
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

// Of each direction of a pair: what may be on its way from one end to the other.
inline constexpr std::size_t kRelayChunkBytes = 64 << 10;

class End {
 public:
  using ErrorCode = boost::system::error_code;
  // A part of a message, or its end.
  struct Got {
    ErrorCode error{};
    bool closed_in_order = false;    // of an error: a close by the rules of WebSocket
    std::span<std::byte> payload{};  // unmasked; valid until the next read
    bool message_done = false;
    bool binary = true;
  };

  using Request = boost::beast::http::request<boost::beast::http::string_body>;

  virtual ~End() = default;
  // The answer 101; the request has been judged already.
  virtual asio::awaitable<ErrorCode> accept(const Request& request) = 0;
  // Pings are answered inside. `before_large`: where a large payload is expected it is left in the
  // socket, for somebody who moves it without reading it (see bare_left).
  virtual asio::awaitable<Got> read_piece(bool before_large) = 0;
  virtual asio::awaitable<ErrorCode> write_piece(std::span<const std::byte> payload, bool message_done,
                                                 bool binary) = 0;
  // To another thread's loop, before the first operation of a pair, with none under way.
  virtual void move_to(asio::any_io_executor executor) = 0;
  // Belongs to a pair from now on: a peer that vanishes is to be noticed within seconds, and
  // pieces may be of kRelayChunkBytes.
  virtual void watch_closely() = 0;
  // Begin at once and end by themselves; on `home`.
  virtual void ping() = 0;
  virtual void close(RelayClose code, std::string reason) = 0;
  virtual void abort() = 0;  // shuts the socket down: every operation fails

  // For bytes that pass by the kernel's hand (relay_splice.h): an end over plain TCP has a
  // descriptor, others -1.
  virtual int bare_fd() const = 0;
  // Payload bytes of the frame under way that are still in the socket and need no unmasking.
  virtual std::uint64_t bare_left() const = 0;
  // Of that frame: does it end a message, and of which kind.
  virtual bool bare_ends_message() const = 0;
  virtual bool bare_is_binary() const = 0;
  virtual void took_bare(std::uint64_t bytes) = 0;  // so many of them
  virtual asio::awaitable<ErrorCode> wait_readable() = 0;
  virtual asio::awaitable<ErrorCode> wait_writable() = 0;
  // The header of a frame whose payload follows from somewhere else; then end_frame(). Where the
  // payload breaks off nothing more can be said on this connection: abort().
  virtual asio::awaitable<ErrorCode> begin_frame(std::uint64_t payload_bytes, bool message_done, bool binary) = 0;
  virtual void end_frame() = 0;

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
