#include "net/stream.h"

#include <poll.h>

#include <cerrno>

namespace kvasir::net {

Result<bool> wait_ready(const Stream& stream, int timeout_ms, bool reading) {
  if (reading && stream.buffered_input()) return true;
  pollfd entry{.fd = stream.fd(), .events = stream.wants(reading), .revents = 0};
  const int ready = ::poll(&entry, 1, timeout_ms);
  // Interrupted counts as a time-out: the caller looks at its own flags and deadline anyway.
  if (ready < 0 && errno != EINTR) return fatal("cannot wait for a connection: " + errno_text(errno) + ".");
  return ready > 0;
}

}  // namespace kvasir::net
