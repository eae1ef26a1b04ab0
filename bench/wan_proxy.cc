// kvasir-wan-proxy: a network between a backbone and its workers, on one machine.
//
//   kvasir-wan-proxy --rtt-us 30000 --jitter-us 5000 [--mbit N] --to PORT [--to PORT …]
//
// Prints one line with a port of its own for each --to. Every chunk of bytes from the backbone
// is held for half the round trip, every chunk back for the other half plus a draw from
// [-jitter, +jitter]; order is kept in each direction of a connection, and --mbit bounds its
// rate. Commands on standard input, one a line: "swallow I" (bytes of worker I vanish from now
// on, on new connections too, while they stay open).
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <deque>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "net/connect.h"

namespace {

using kvasir::Bytes;
using kvasir::Nanos;
using kvasir::TimePoint;

constexpr std::size_t kReadBytes = 64 << 10;
// A sender is stopped when so much of its bytes is under way.
constexpr std::size_t kHeldBytesMax = 64 << 20;

struct Network {
  Nanos half{}, jitter{};
  double bytes_per_ns = 0;  // 0: no bound
  std::mt19937_64 random{1};
  Nanos draw() {
    if (jitter == Nanos(0)) return Nanos(0);
    return Nanos(std::uniform_int_distribution<std::int64_t>(-jitter.count(), jitter.count())(random));
  }
};

// One direction of a connection.
class Pipe {
 public:
  Pipe(Network& network, bool jittered) : network_(network), jittered_(jittered) {}

  bool wants_input() const { return !ended_ && held_ < kHeldBytesMax; }
  bool has_due(TimePoint now) const { return !chunks_.empty() && chunks_.front().due <= now; }
  TimePoint next_due() const { return chunks_.empty() ? TimePoint::max() : chunks_.front().due; }
  bool done() const { return ended_ && chunks_.empty(); }
  void swallow() { swallowing_ = true; }

  // False: the connection is broken.
  bool read_from(int fd, TimePoint now) {
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
    return true;
  }

  bool write_to(int fd, TimePoint now) {
    while (has_due(now)) {
      Chunk& chunk = chunks_.front();
      if (swallowing_) {
        chunks_.clear();
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

struct Session {
  std::size_t worker = 0;
  kvasir::net::Fd near, far;
  Pipe out, back;
  bool finished = false;
  void swallow() {
    out.swallow();
    back.swallow();
  }
};

struct Worker {
  std::uint16_t port = 0;
  kvasir::net::Listener listener;
  bool swallowed = false;
};

class Proxy {
 public:
  Proxy(Network network, const std::vector<std::uint16_t>& ports) : network_(network) {
    for (std::uint16_t port : ports) workers_.push_back({port, kvasir::net::listen_on({"127.0.0.1", 0}).value(), false});
  }

  void print_ports() const {
    std::string line;
    for (const Worker& worker : workers_) line += (line.empty() ? "" : " ") + std::to_string(worker.listener.port);
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  }

  void run() {
    while (true) {
      gather();
      const TimePoint now = kvasir::monotonic_now();
      const Nanos wait = std::clamp(next_due() - now, Nanos(0), Nanos(std::chrono::seconds(1)));
      const timespec timeout{.tv_sec = wait.count() / 1'000'000'000, .tv_nsec = wait.count() % 1'000'000'000};
      if (::ppoll(fds_.data(), fds_.size(), &timeout, nullptr) < 0 && errno != EINTR) return;
      if (fds_[0].revents != 0 && !obey()) return;
      for (std::size_t i = 0; i < workers_.size(); ++i)
        if (fds_[1 + i].revents != 0) accept(i);
      move();
    }
  }

 private:
  void gather() {
    fds_.assign(1, {.fd = STDIN_FILENO, .events = POLLIN, .revents = 0});
    for (const Worker& worker : workers_) fds_.push_back({.fd = worker.listener.fd.get(), .events = POLLIN, .revents = 0});
    for (const auto& s : sessions_) {
      fds_.push_back({.fd = s->near.get(), .events = static_cast<short>(s->out.wants_input() ? POLLIN : 0), .revents = 0});
      fds_.push_back({.fd = s->far.get(), .events = static_cast<short>(s->back.wants_input() ? POLLIN : 0), .revents = 0});
    }
  }
  TimePoint next_due() const {
    TimePoint due = TimePoint::max();
    for (const auto& s : sessions_) due = std::min({due, s->out.next_due(), s->back.next_due()});
    // Bytes that the other end does not take are tried again after a while.
    return due == TimePoint::max() ? due : std::max(due, kvasir::monotonic_now() + Nanos(std::chrono::microseconds(20)));
  }

  void accept(std::size_t i) {
    auto accepted = kvasir::net::accept_from(workers_[i].listener);
    if (!accepted || !*accepted) return;
    auto far = kvasir::net::connect_to({"127.0.0.1", workers_[i].port}, std::chrono::seconds(1));
    if (!far) return;  // nobody there: the near end is closed
    sessions_.push_back(std::make_unique<Session>(i, std::move((*accepted)->fd), *std::move(far), Pipe(network_, false), Pipe(network_, true)));
    if (workers_[i].swallowed) sessions_.back()->swallow();
  }

  void move() {
    const TimePoint now = kvasir::monotonic_now();
    for (const auto& s : sessions_) {
      const bool sound = (!s->out.wants_input() || s->out.read_from(s->near.get(), now)) &&
                         (!s->back.wants_input() || s->back.read_from(s->far.get(), now)) && s->out.write_to(s->far.get(), now) &&
                         s->back.write_to(s->near.get(), now);
      s->finished = !sound || s->out.done() || s->back.done();
    }
    std::erase_if(sessions_, [](const auto& s) { return s->finished; });
  }

  bool obey() {
    std::string command;
    std::size_t worker = 0;
    if (!(std::cin >> command >> worker)) return false;
    if (worker >= workers_.size()) return true;
    if (command == "swallow") {
      workers_[worker].swallowed = true;
      for (const auto& s : sessions_)
        if (s->worker == worker) s->swallow();
    }
    return true;
  }

  Network network_;
  std::vector<Worker> workers_;
  std::vector<std::unique_ptr<Session>> sessions_;
  std::vector<pollfd> fds_;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A network with delay, jitter, a bounded rate and swallowed bytes between loopback ports");
  std::int64_t rtt_us = 0, jitter_us = 0;
  double mbit = 0;
  std::vector<std::uint16_t> ports;
  app.add_option("--rtt-us", rtt_us, "round trip, microseconds")->check(CLI::Range(0, 10'000'000));
  app.add_option("--jitter-us", jitter_us, "the round trip varies by so much both ways, uniformly")->check(CLI::Range(0, 5'000'000));
  app.add_option("--mbit", mbit, "rate of each direction of a connection, Mbit/s; 0: no bound")->check(CLI::NonNegativeNumber);
  app.add_option("--to", ports, "a worker's port on this machine")->required();
  CLI11_PARSE(app, argc, argv);
  Network network;
  network.half = std::chrono::microseconds(rtt_us) / 2;
  network.jitter = std::chrono::microseconds(jitter_us);
  network.bytes_per_ns = mbit / 8000;
  Proxy proxy(network, ports);
  proxy.print_ports();
  proxy.run();
}
