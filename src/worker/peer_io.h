// Waiting for one peer from its connection's own thread, never longer than a deadline.
#pragma once

#include <cstdint>
#include <span>

#include "base/clock.h"
#include "base/error.h"
#include "net/fd.h"
#include "net/frame_io.h"
#include "net/stream.h"
#include "worker/limits.h"

namespace kvasir::worker {

// An eventfd that interrupts a wait.
class Wake {
 public:
  Wake();
  int fd() const { return fd_.get(); }
  void raise() const;   // any thread, and signal handlers
  void clear() const;

 private:
  net::Fd fd_;
};

// How long a peer may take over `bytes`.
inline Nanos time_allowed(const Timeouts& timeouts, std::uint64_t bytes) {
  return timeouts.stall + std::chrono::milliseconds(bytes / kSlowestPeerBytesPerMs);
}

// Until the stream is ready for wants(reading), or `wake` is raised (it is cleared then), or
// the deadline. Either may be null.
void wait_for(const net::Stream* stream, bool reading, const Wake* wake, TimePoint deadline);

// Sends a frame whole, or says that the peer is too slow or gone.
Status send_whole(net::Stream& stream, net::FrameWriter& writer, const Timeouts& timeouts, ByteSpan prefix,
                  ByteSpan rows = {});
// Fills `out`: true; false if the peer closed before its first byte.
Result<bool> read_whole(net::Stream& stream, std::span<std::byte> out, TimePoint deadline);

// Lets the peer read what was sent last: closing at once with bytes unread would reset the
// connection and take the explanation with it.
void linger(net::Stream& stream, std::chrono::milliseconds at_most);

}  // namespace kvasir::worker
