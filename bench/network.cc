#include "network.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <deque>

#include "base/bytes.h"

namespace kvasir::bench {
namespace {

constexpr std::size_t kReadBytes = 64 << 10;
// A sender is stopped when so much of its bytes is under way.
constexpr std::size_t kHeldBytesMax = 64 << 20;

// One direction of a connection.
class Pipe {
 public:
  Pipe(Network& network, bool jittered) : network_(network), jittered_(jittered) {}

  bool wants_input() const { return !ended_ && held_ < kHeldBytesMax; }
  bool has_due(TimePoint now) const { return !chunks_.empty() && chunks_.front().due <= now; }
  TimePoint next_due() const { return chunks_.empty() ? TimePoint::max() : chunks_.front().due; }
  bool done() const { return ended_ && chunks_.empty(); }
  void swallow() { swallowing_ = true; }

  // False: the connection is broken. `held`: told of each chunk that is held back.
  template <typename Held>
  bool read_from(int fd, TimePoint now, Held&& held) {
    std::array<std::byte, kReadBytes> buffer;
    const ssize_t n = ::recv(fd, buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    if (n == 0) {
      ended_ = true;
      return true;
    }
    if (swallowing_) return true;
    TimePoint due = now + network_.half + (jittered_ ? network_.draw() : Nanos(0));
    if (network_.bytes_per_ns > 0) {
      line_free_ = std::max(line_free_, now) + Nanos(static_cast<std::int64_t>(static_cast<double>(n) / network_.bytes_per_ns));
      due = std::max(due, line_free_ + network_.half);
    }
    last_due_ = std::max(last_due_, due);  // TCP keeps the order
    held_ += static_cast<std::size_t>(n);
    chunks_.push_back({last_due_, Bytes(buffer.begin(), buffer.begin() + n), 0});
    held(static_cast<std::size_t>(n), last_due_, last_due_ - now);
    return true;
  }

  bool write_to(int fd, TimePoint now) {
    while (has_due(now)) {
      Chunk& chunk = chunks_.front();
      if (swallowing_) {
        chunks_.clear();
        held_ = 0;
        return true;
      }
      const ssize_t n = ::send(fd, chunk.bytes.data() + chunk.sent, chunk.bytes.size() - chunk.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n < 0) return errno == EAGAIN || errno == EINTR;
      chunk.sent += static_cast<std::size_t>(n);
      held_ -= static_cast<std::size_t>(n);
      if (chunk.sent == chunk.bytes.size()) chunks_.pop_front();
    }
    return true;
  }

 private:
  struct Chunk {
    TimePoint due;
    Bytes bytes;
    std::size_t sent;
  };
  Network& network_;
  const bool jittered_;
  bool ended_ = false, swallowing_ = false;
  std::size_t held_ = 0;
  TimePoint last_due_{}, line_free_{};
  std::deque<Chunk> chunks_;
};

}  // namespace

Nanos Network::draw() {
  if (jitter == Nanos(0)) return Nanos(0);
  return Nanos(std::uniform_int_distribution<std::int64_t>(-jitter.count(), jitter.count())(random));
}

struct Proxy::Session {
  std::size_t worker = 0;
  net::Fd near, far;
  Pipe out, back;
  bool finished = false;
  void swallow() {
    out.swallow();
    back.swallow();
  }
};

Proxy::Proxy(Network network, const std::vector<std::uint16_t>& ports) : network_(network) {
  for (std::uint16_t port : ports) workers_.push_back({port, net::listen_on({"127.0.0.1", 0}).value(), false});
}

Proxy::~Proxy() = default;

std::vector<std::uint16_t> Proxy::ports() const {
  std::vector<std::uint16_t> out;
  for (const Worker& worker : workers_) out.push_back(worker.listener.port);
  return out;
}

void Proxy::swallow(std::size_t worker) {
  if (worker >= workers_.size()) return;
  workers_[worker].swallowed = true;
  for (const auto& s : sessions_)
    if (s->worker == worker) s->swallow();
}

bool Proxy::run_until_readable(int fd) {
  while (true) {
    gather(fd);
    const Nanos wait = std::clamp(next_due() - monotonic_now(), Nanos(0), Nanos(std::chrono::seconds(1)));
    const timespec timeout{.tv_sec = wait.count() / 1'000'000'000, .tv_nsec = wait.count() % 1'000'000'000};
    if (::ppoll(fds_.data(), fds_.size(), &timeout, nullptr) < 0 && errno != EINTR) return false;
    if (fds_[0].revents != 0) return true;
    for (std::size_t i = 0; i < workers_.size(); ++i)
      if (fds_[1 + i].revents != 0) accept(i);
    move();
  }
}

void Proxy::gather(int fd) {
  fds_.assign(1, {.fd = fd, .events = POLLIN, .revents = 0});
  for (const Worker& worker : workers_) fds_.push_back({.fd = worker.listener.fd.get(), .events = POLLIN, .revents = 0});
  for (const auto& s : sessions_) {
    fds_.push_back({.fd = s->near.get(), .events = static_cast<short>(s->out.wants_input() ? POLLIN : 0), .revents = 0});
    fds_.push_back({.fd = s->far.get(), .events = static_cast<short>(s->back.wants_input() ? POLLIN : 0), .revents = 0});
  }
}

TimePoint Proxy::next_due() const {
  TimePoint due = TimePoint::max();
  for (const auto& s : sessions_) due = std::min({due, s->out.next_due(), s->back.next_due()});
  // Bytes that the other end does not take are tried again after a while.
  return due == TimePoint::max() ? due : std::max(due, monotonic_now() + Nanos(std::chrono::microseconds(20)));
}

void Proxy::accept(std::size_t i) {
  auto accepted = net::accept_from(workers_[i].listener);
  if (!accepted || !*accepted) return;
  auto far = net::connect_to({"127.0.0.1", workers_[i].port}, std::chrono::seconds(1));
  if (!far) return;  // nobody there: the near end is closed
  sessions_.push_back(std::make_unique<Session>(i, std::move((*accepted)->fd), *std::move(far), Pipe(network_, false), Pipe(network_, true)));
  if (workers_[i].swallowed) sessions_.back()->swallow();
}

void Proxy::move() {
  const TimePoint now = monotonic_now();
  const auto quiet = [](std::size_t, TimePoint, Nanos) {};
  for (const auto& s : sessions_) {
    const auto told = [&](std::size_t bytes, TimePoint due, Nanos held) {
      if (on_held_) on_held_(s->worker, bytes, due, held);
    };
    const bool sound = (!s->out.wants_input() || s->out.read_from(s->near.get(), now, quiet)) &&
                       (!s->back.wants_input() || s->back.read_from(s->far.get(), now, told)) &&
                       s->out.write_to(s->far.get(), now) && s->back.write_to(s->near.get(), now);
    s->finished = !sound || s->out.done() || s->back.done();
  }
  std::erase_if(sessions_, [](const auto& s) { return s->finished; });
}

}  // namespace kvasir::bench
