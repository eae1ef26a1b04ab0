#include "hub/relay/relay_splice.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace kvasir::hub {
namespace {

constexpr int kPartsAtOnce = 8;

std::atomic<int> n_pipes{0};

}  // namespace

std::unique_ptr<SplicePipe> SplicePipe::make_or_null() {
  int ends[2];
  if (n_pipes.fetch_add(1, std::memory_order_relaxed) < kSplicePipesMax && ::pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0) {
    // Past a user's share of pipe memory the kernel gives pipes of a page or two: not worth it.
    if (::fcntl(ends[0], F_SETPIPE_SZ, static_cast<int>(kSplicePipeBytes)) >= static_cast<int>(kSplicePipeBytes))
      return std::unique_ptr<SplicePipe>(new SplicePipe(ends[0], ends[1]));
    ::close(ends[0]);
    ::close(ends[1]);
  }
  n_pipes.fetch_sub(1, std::memory_order_relaxed);
  return nullptr;
}

SplicePipe::~SplicePipe() {
  ::close(read_end_);
  ::close(write_end_);
  n_pipes.fetch_sub(1, std::memory_order_relaxed);
}

asio::awaitable<SplicePipe::Moved> SplicePipe::move_frame(End& from, End& to, MovedBytes& moved) {
  const unsigned flags = SPLICE_F_MOVE | SPLICE_F_NONBLOCK;
  bool begun = false;
  for (int part = 1; from.bare_left() > 0; ++part) {
    // A frame may be endless; others on this thread want their turn.
    if (part % kPartsAtOnce == 0) co_await asio::post(asio::use_awaitable);
    const auto wanted = static_cast<std::size_t>(std::min<std::uint64_t>(from.bare_left(), kSplicePipeBytes));
    const ssize_t taken = ::splice(from.bare_fd(), nullptr, write_end_, nullptr, wanted, flags);
    if (taken < 0 && errno == EINTR) continue;
    if (taken < 0 && errno == EINVAL && !begun) co_return Moved::kCannot;
    if (taken < 0 && errno == EAGAIN) {
      // Whoever is slow here, it is not `to`.
      to.writing_since_ns.store(0, std::memory_order_relaxed);
      if (!co_await from.wait_readable()) continue;
    }
    if (taken <= 0) {
      if (begun) {
        to.abort();
        to.end_frame();
      }
      co_return Moved::kFromFailed;
    }
    if (!std::exchange(begun, true)) {
      if (co_await to.begin_frame(from.bare_left(), from.bare_ends_message(), from.bare_is_binary()))
        co_return Moved::kToFailed;
    }
    to.writing_since_ns.store(End::now_ns(), std::memory_order_relaxed);
    from.took_bare(static_cast<std::uint64_t>(taken));
    for (auto left = static_cast<std::size_t>(taken); left > 0;) {
      const ssize_t n = ::splice(read_end_, nullptr, to.bare_fd(), nullptr, left, flags);
      bool failed = n == 0;
      if (n > 0) left -= static_cast<std::size_t>(n);
      else if (n < 0 && errno == EAGAIN) failed = static_cast<bool>(co_await to.wait_writable());
      else if (n < 0 && errno != EINTR) failed = true;
      if (failed) {
        to.end_frame();
        co_return Moved::kToFailed;
      }
    }
    moved.add(static_cast<std::uint64_t>(taken));
  }
  to.end_frame();
  co_return Moved::kWhole;
}

}  // namespace kvasir::hub
