#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "net/stream.h"

namespace kvasir::net {
namespace {

constexpr std::size_t kPartsPerCallMax = 64;  // well under the kernel's 1024

class PlainStream final : public Stream {
 public:
  using Stream::Stream;

  Result<IoResult> read_some(std::span<std::byte> into) override {
    while (true) {
      const ssize_t n = ::recv(fd(), into.data(), into.size(), 0);
      if (n > 0) return IoResult{IoState::kDone, static_cast<std::size_t>(n)};
      if (n == 0) return IoResult{IoState::kEnd, 0};
      if (errno == EAGAIN || errno == EWOULDBLOCK) return IoResult{IoState::kWouldBlock, 0};
      if (errno != EINTR) return retry_elsewhere("the connection was lost: " + errno_text(errno) + ".");
    }
  }

  Result<IoResult> write_some(std::span<const iovec> parts) override {
    write_blocked_ = false;
    if (std::ranges::all_of(parts, [](const iovec& part) { return part.iov_len == 0; }))
      return IoResult{IoState::kDone, 0};
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts.data());  // sendmsg does not write to it
    message.msg_iovlen = std::min(parts.size(), kPartsPerCallMax);
    while (true) {
      const ssize_t n = ::sendmsg(fd(), &message, MSG_NOSIGNAL);
      if (n >= 0) return IoResult{IoState::kDone, static_cast<std::size_t>(n)};
      if (errno == EAGAIN || errno == EWOULDBLOCK) {
        write_blocked_ = true;
        return IoResult{IoState::kWouldBlock, 0};
      }
      if (errno != EINTR) return retry_elsewhere("the connection was lost: " + errno_text(errno) + ".");
    }
  }

  short wants(bool reading) const override {
    return static_cast<short>((reading ? POLLIN : 0) | (write_blocked_ ? POLLOUT : 0));
  }
  bool buffered_input() const override { return false; }
  bool buffered_output() const override { return false; }
  bool encrypted() const override { return false; }
  void shutdown() override { ::shutdown(fd(), SHUT_WR); }

 private:
  bool write_blocked_ = false;
};

}  // namespace

std::unique_ptr<Stream> make_plain_stream(Fd fd) { return std::make_unique<PlainStream>(std::move(fd)); }

}  // namespace kvasir::net
