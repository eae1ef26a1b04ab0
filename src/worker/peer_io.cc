#include "worker/peer_io.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <new>

namespace kvasir::worker {

Wake::Wake() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!fd_) throw std::bad_alloc();  // out of descriptors: the caller refuses the connection
}

void Wake::raise() const { ::eventfd_write(fd_.get(), 1); }

void Wake::clear() const {
  eventfd_t value;
  ::eventfd_read(fd_.get(), &value);
}

void wait_for(const net::Stream* stream, bool reading, const Wake* wake, TimePoint deadline) {
  if (stream && reading && stream->buffered_input()) return;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - monotonic_now()).count();
  std::array<pollfd, 2> fds{{{-1, 0, 0}, {wake ? wake->fd() : -1, POLLIN, 0}}};
  if (stream) fds[0] = {stream->fd(), stream->wants(reading), 0};
  ::poll(fds.data(), fds.size(), static_cast<int>(std::clamp<std::int64_t>(left, 0, 3'600'000)));
  if (fds[1].revents != 0) wake->clear();
}

Status send_whole(net::Stream& stream, net::FrameWriter& writer, const Timeouts& timeouts, ByteSpan prefix,
                  ByteSpan rows) {
  KVASIR_TRY(writer.send(stream, prefix, rows));
  return flush_whole(stream, writer, timeouts);
}

Status flush_whole(net::Stream& stream, net::FrameWriter& writer, const Timeouts& timeouts) {
  if (writer.idle(stream)) return {};
  const std::size_t total = writer.queued_bytes();
  Progress progress(timeouts);
  while (true) {
    KVASIR_ASSIGN(const bool sent, writer.flush(stream));
    if (sent) return {};
    const TimePoint now = monotonic_now();
    progress.note(writer.queued_bytes(), total, now);
    if (now >= progress.deadline()) return retry_elsewhere("it reads its answers too slowly.");
    wait_for(&stream, /*reading=*/false, nullptr, progress.deadline());
  }
}

Result<bool> read_whole(net::Stream& stream, std::span<std::byte> out, TimePoint deadline) {
  std::size_t filled = 0;
  while (filled < out.size()) {
    KVASIR_ASSIGN(const net::IoResult got, stream.read_some(out.subspan(filled)));
    filled += got.bytes;
    if (got.state == net::IoState::kEnd) {
      if (filled == 0) return false;
      return retry_elsewhere("it closed the connection in the middle of a request.");
    }
    if (got.state != net::IoState::kWouldBlock) continue;
    if (monotonic_now() >= deadline) return retry_elsewhere("it stopped in the middle of a request.");
    wait_for(&stream, /*reading=*/true, nullptr, deadline);
  }
  return true;
}

void linger(net::Stream& stream, std::chrono::milliseconds at_most) {
  stream.shutdown();
  const TimePoint deadline = monotonic_now() + at_most;
  std::array<std::byte, 16384> discarded;
  while (monotonic_now() < deadline) {
    const Result<net::IoResult> got = stream.read_some(discarded);
    if (!got || got->state == net::IoState::kEnd) return;
    if (got->state == net::IoState::kWouldBlock) wait_for(&stream, /*reading=*/true, nullptr, deadline);
  }
}

}  // namespace kvasir::worker
