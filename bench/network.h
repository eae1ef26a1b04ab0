// A network between a backbone and its workers, on one machine: every chunk of bytes towards a worker
// is held for half the round trip, every chunk back for the other half plus a draw from
// [-jitter, +jitter]; order is kept in each direction of a connection, and a rate may bound it.
#pragma once

#include <poll.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "base/clock.h"
#include "net/connect.h"

namespace kvasir::bench {

struct Network {
  Nanos half{}, jitter{};
  double bytes_per_ns = 0;  // of each direction of a connection; 0: no bound
  std::mt19937_64 random{1};
  Nanos draw();
};

class Proxy {
 public:
  // `bytes` that come back from a worker are held for `held` and leave at `due`; called before they leave.
  using OnHeld = std::function<void(std::size_t worker, std::size_t bytes, TimePoint due, Nanos held)>;
  // One listener on loopback for each worker's port there.
  Proxy(Network network, const std::vector<std::uint16_t>& ports);
  ~Proxy();
  void on_held(OnHeld told) { on_held_ = std::move(told); }

  std::vector<std::uint16_t> ports() const;
  // Bytes of that worker vanish from now on, on new connections too, while they stay open.
  void swallow(std::size_t worker);
  // Moves bytes until `fd` can be read: true; false: something is wrong with waiting.
  bool run_until_readable(int fd);

 private:
  struct Session;
  struct Worker {
    std::uint16_t port = 0;
    net::Listener listener;
    bool swallowed = false;
  };
  void gather(int fd);
  TimePoint next_due() const;
  void accept(std::size_t i);
  void move();

  Network network_;
  OnHeld on_held_;
  std::vector<Worker> workers_;
  std::vector<std::unique_ptr<Session>> sessions_;
  std::vector<pollfd> fds_;
};

}  // namespace kvasir::bench
