// What the background thread and the drivers of one Dispatcher share. Lock order: none is
// held while another is taken, but Shared::mutex may be held while a Port's is taken.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "dispatch/client/link.h"
#include "dispatch/core/fleet.h"
#include "dispatch/dispatcher.h"
#include "net/fd.h"

namespace kvasir::dispatch {

// About a second of refused attempts: such a worker is not coming up just now.
inline constexpr std::uint32_t kFailuresSettled = 5;

// Wakes a thread that polls: an eventfd.
class Bell {
 public:
  Bell() = default;  // rings for nobody
  static Result<Bell> create();
  void ring() const;
  void clear() const;
  int fd() const { return fd_.get(); }

 private:
  explicit Bell(net::Fd fd) : fd_(std::move(fd)) {}
  net::Fd fd_;
};

// From the background thread to one driver.
struct Mail {
  WorkerIndex worker = 0;
  std::unique_ptr<Link> link;  // null: give up the link you have, the worker is lost
};

// From a driver to the background thread.
struct LinkLost {
  WorkerIndex worker = 0;
  Nanos wait{};  // before the next attempt
};

// The two mailboxes between one driver and the background thread.
class Port {
 public:
  explicit Port(Bell bell) : bell_(std::move(bell)) {}

  void post(Mail mail);
  std::vector<Mail> collect();  // driver
  bool has_mail() const { return has_mail_.load(std::memory_order_acquire); }
  int fd() const { return bell_.fd(); }

  void report_lost(LinkLost lost);
  std::vector<LinkLost> collect_lost();  // background thread

 private:
  Bell bell_;
  std::atomic<bool> has_mail_{false};
  std::mutex mutex_;
  std::vector<Mail> mail_;
  std::vector<LinkLost> lost_;
};

// Counters of all drivers; relaxed, each monotonic.
struct AtomicStats {
  std::atomic<std::uint64_t> rounds{0}, pairs_remote{0}, pairs_local{0}, bytes_sent{0}, bytes_received{0}, hedges{0},
      late_answers{0}, invalid_answers{0}, workers_lost{0}, reconnects{0}, round_ns_sum{0};
};
inline void add(std::atomic<std::uint64_t>& counter, std::uint64_t n) {
  if (n > 0) counter.fetch_add(n, std::memory_order_relaxed);
}

struct LayerEntry : Layer {
  LayerKey key() const { return {layer_id, recipe.group}; }
  mutable std::array<std::atomic<std::uint64_t>, 40> rounds{};  // see LayerTimes; a count is no part of the layer
};

struct Shared {
  Shared(Options options_in, const Tuning& tuning, std::uint64_t seed, Bell bell_in)
      : options(std::move(options_in)), fleet(options.workers.size(), tuning, seed), bell(std::move(bell_in)) {}

  void log(const std::string& line) const {
    if (options.log) options.log(line);
  }

  wire::Hello hello() const {
    return {.role = wire::Role::kBackbone,
            .numerics = options.numerics,
            .software = "kvasir",
            .numerics_id = options.numerics_id,
            .token = options.token};
  }

  const Options options;
  std::vector<std::string> names;  // of the workers, "host:port"
  AtomicStats stats;

  std::mutex mutex;  // guards fleet, ports, layers
  Fleet fleet;
  std::vector<std::shared_ptr<Port>> ports;
  std::deque<LayerEntry> layers;
  bool first_wait_done = false;  // the configured workers have had their time to connect

  Bell bell;  // wakes the background thread
  std::atomic<bool> stop{false};
};

}  // namespace kvasir::dispatch
