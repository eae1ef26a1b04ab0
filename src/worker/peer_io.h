// Waiting for one peer from its connection's own thread, never longer than a deadline.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
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

// How long a peer may take over `bytes` in all, however steadily it moves.
inline Nanos time_allowed(const Timeouts& timeouts, std::uint64_t bytes) {
  return timeouts.stall + std::chrono::milliseconds(bytes / kSlowestPeerBytesPerMs);
}

// Watches one transfer: it may not stand still for `stall`, nor crawl below the slowest
// speed allowed.
class Progress {
 public:
  explicit Progress(const Timeouts& timeouts) : timeouts_(timeouts) {}
  // `bytes_left`, or any other count that changes when bytes move; `bytes_total` so far.
  void note(std::size_t count, std::uint64_t bytes_total, TimePoint now) {
    if (!begun_) begun_ = now;
    if (count != count_ || moved_ == TimePoint{}) moved_ = now;
    count_ = count;
    deadline_ = std::min(moved_ + timeouts_.stall, *begun_ + time_allowed(timeouts_, bytes_total));
  }
  void end() {
    begun_.reset();
    moved_ = {};
    deadline_ = TimePoint::max();
  }
  TimePoint deadline() const { return deadline_; }

 private:
  const Timeouts& timeouts_;
  std::optional<TimePoint> begun_;
  TimePoint moved_{};
  std::size_t count_ = 0;
  TimePoint deadline_ = TimePoint::max();
};

// Until the stream is ready for wants(reading), or `wake` is raised (it is cleared then), or
// the deadline. Either may be null.
void wait_for(const net::Stream* stream, bool reading, const Wake* wake, TimePoint deadline);

// Waits until what is queued has left, or says that the peer is too slow or gone.
Status flush_whole(net::Stream& stream, net::FrameWriter& writer, const Timeouts& timeouts);
// Sends a frame whole, or says that the peer is too slow or gone.
Status send_whole(net::Stream& stream, net::FrameWriter& writer, const Timeouts& timeouts, ByteSpan prefix,
                  ByteSpan rows = {});
// Fills `out`: true; false if the peer closed before its first byte.
Result<bool> read_whole(net::Stream& stream, std::span<std::byte> out, TimePoint deadline);

// Lets the peer read what was sent last: closing at once with bytes unread would reset the
// connection and take the explanation with it.
void linger(net::Stream& stream, std::chrono::milliseconds at_most);

}  // namespace kvasir::worker
