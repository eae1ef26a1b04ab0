// The seam under which a connection is plain TCP, TLS, a WebSocket, or one inside the other.
// Non-blocking: a call that cannot
// go on says so, and wants() tells what to poll for. One thread at a time per stream.
//
// Rules for callers:
//  - read until kWouldBlock before polling, or ask buffered_input(): a TLS stream may hold
//    decrypted bytes that poll does not see;
//  - after the last write go on calling write_some({}) while buffered_output(): a TLS
//    stream accepts bytes that the socket has not taken yet;
//  - any error, and kEnd, is final. Deadlines are the caller's.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <span>

#include "base/error.h"
#include "net/fd.h"

namespace kvasir::net {

enum class IoState {
  kDone,        // `bytes` > 0 were moved
  kWouldBlock,  // nothing moved; poll for wants()
  kEnd,         // read: the peer has closed its side in order
};

struct IoResult {
  IoState state = IoState::kWouldBlock;
  std::size_t bytes = 0;
};

class Stream {
 public:
  explicit Stream(Fd fd) : fd_(std::move(fd)) {}
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // `into` is not empty. Reads what is there, up to its size, usually by one system call.
  virtual Result<IoResult> read_some(std::span<std::byte> into) = 0;
  // Gathers from `parts` (any number; a call may take only the first of them). With no
  // bytes at all it only moves buffered output: kDone with 0 bytes when there is none left.
  virtual Result<IoResult> write_some(std::span<const iovec> parts) = 0;

  // A hint: about so many bytes follow, perhaps in several calls, and belong together.
  virtual void expect_to_write(std::size_t /*bytes*/) {}

  // Poll events: POLLIN if the caller reads, and whatever a blocked call waits for. With TLS
  // a blocked read may wait for POLLOUT and a blocked write for POLLIN (the handshake).
  virtual short wants(bool reading = true) const = 0;
  virtual bool buffered_input() const = 0;
  virtual bool buffered_output() const = 0;
  virtual bool encrypted() const = 0;
  // Tells the peer that no more bytes will come; buffered output that the socket does not
  // take at once is lost. Reading stays possible.
  virtual void shutdown() = 0;

  virtual int fd() const { return fd_.get(); }

 private:
  Fd fd_;
};

// `fd` is a connected, non-blocking stream socket.
std::unique_ptr<Stream> make_plain_stream(Fd fd);

// Polls the stream for wants(reading): true when it is ready (or has buffered input and
// `reading`), false after `timeout_ms` (-1: never).
Result<bool> wait_ready(const Stream& stream, int timeout_ms, bool reading = true);

}  // namespace kvasir::net
