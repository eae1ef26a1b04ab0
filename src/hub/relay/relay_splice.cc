#include "hub/relay/relay_splice.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace kvasir::hub {
namespace {

std::atomic<int> n_pipes{0};

End::ErrorCode last_error() { return {errno, boost::system::system_category()}; }

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

asio::awaitable<SplicePipe::Moved> SplicePipe::move_some(End& from, End& to) {
  const unsigned flags = SPLICE_F_MOVE | SPLICE_F_NONBLOCK;
  ssize_t n = 0;
  while (true) {
    const auto wanted = static_cast<std::size_t>(std::min<std::uint64_t>(from.bare_left(), kSplicePipeBytes));
    n = ::splice(from.bare_fd(), nullptr, write_end_, nullptr, wanted, flags);
    if (n > 0) break;
    if (n == 0) co_return Moved{.got = {.error = asio::error::eof}};
    if (errno == EINTR) continue;
    if (errno == EINVAL) co_return Moved{.got = {}, .refused = true};
    if (errno != EAGAIN) co_return Moved{.got = {.error = last_error()}};
    if (const auto error = co_await from.wait_readable()) co_return Moved{.got = {.error = error}};
  }
  const auto bytes = static_cast<std::uint64_t>(n);
  Moved out{.got = from.took_bare(bytes), .bytes = bytes};
  if (co_await to.begin_frame(bytes, out.got.message_done, out.got.binary)) {
    out.to_failed = true;
    co_return out;
  }
  for (std::uint64_t left = bytes; left > 0 && !out.to_failed;) {
    n = ::splice(read_end_, nullptr, to.bare_fd(), nullptr, static_cast<std::size_t>(left), flags);
    if (n > 0) left -= static_cast<std::uint64_t>(n);
    else if (n == 0) out.to_failed = true;
    else if (errno == EAGAIN) out.to_failed = static_cast<bool>(co_await to.wait_writable());
    else if (errno != EINTR) out.to_failed = true;
  }
  to.end_frame();
  co_return out;
}

}  // namespace kvasir::hub
