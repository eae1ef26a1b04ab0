// What the background thread and the drivers of one Dispatcher share. Lock order: none is
// held while another is taken, but Shared::mutex may be held while a Port's is taken.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/log_limit.h"
#include "base/mutex.h"
#include "dispatch/client/link.h"
#include "dispatch/core/fleet.h"
#include "dispatch/core/hot_set.h"
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
  bool removed = false;        // …or is no longer in the table: finish the round first
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

  // A worker leaves the table. Mail that nobody has read is taken back; true if the driver
  // never had a link to it, else it says so by report_let_go() when it has none any more.
  bool retire(WorkerIndex w);
  void report_let_go(WorkerIndex w);
  std::vector<WorkerIndex> collect_let_go();  // background thread

 private:
  Bell bell_;
  std::atomic<bool> has_mail_{false};
  Mutex mutex_;
  std::vector<Mail> mail_ KVASIR_GUARDED_BY(mutex_);
  std::vector<LinkLost> lost_ KVASIR_GUARDED_BY(mutex_);
  std::vector<WorkerIndex> let_go_ KVASIR_GUARDED_BY(mutex_);
  std::vector<bool> delivered_ KVASIR_GUARDED_BY(mutex_);  // by worker: the driver has had a link
};

// Counters of all drivers; relaxed, each monotonic.
struct AtomicStats {
  std::atomic<std::uint64_t> rounds{0}, pairs_remote{0}, pairs_local{0}, bytes_sent{0}, bytes_received{0}, hedges{0},
      late_answers{0}, invalid_answers{0}, workers_lost{0}, reconnects{0}, round_ns_sum{0}, rounds_busy{0}, spot_pairs{0},
      spot_wrong{0}, spot_unanswered{0}, spot_undecided{0}, spot_ns_sum{0};
};
inline void add(std::atomic<std::uint64_t>& counter, std::uint64_t n) {
  if (n > 0) counter.fetch_add(n, std::memory_order_relaxed);
}

struct LayerEntry : Layer {
  LayerKey key() const { return {layer_id, recipe.group}; }
  // See LayerTimes and LayerUses; a count is no part of the layer.
  mutable std::array<std::atomic<std::uint64_t>, 40> rounds{};
  mutable std::atomic<std::uint64_t> round_ns_sum{0};
  std::unique_ptr<std::atomic<std::uint64_t>[]> uses;  // by expert
};

// One worker of the table. Written by the background thread while no driver has a link to it.
struct Slot {
  WorkerAddress where;
  std::string name;  // "host:port", for people
};
inline const std::string& served_id(const Slot& slot) { return slot.where.id.empty() ? slot.name : slot.where.id; }

struct Shared {
  Shared(Options options_in, const Tuning& tuning, std::uint64_t seed, Bell bell_in)
      : options(std::move(options_in)),
        remote(options.local != LocalPolicy::kOnly && (options.workers_follow || !options.workers.empty())),
        fleet(0, tuning, seed),
        hot(options.local == LocalPolicy::kFallback ? options.hot_bytes_max : 0),
        bell(std::move(bell_in)) {}

  // Within a bound: what workers do causes its lines.
  void log(const std::string& line) {
    if (!options.log) return;
    if (const auto note = lines.take(monotonic_now())) options.log(line + *note);
  }

  wire::Hello hello(const WorkerAddress& worker) const {
    return {.role = wire::Role::kBackbone,
            .numerics = options.numerics,
            .software = "kvasir",
            .numerics_id = options.numerics_id,
            .token = worker.token.empty() ? options.token : worker.token};
  }

  // Of a worker, without the lock.
  std::string name(WorkerIndex w) {
    const MutexLock lock(mutex);
    return slots[w].name;
  }

  const Options options;
  const bool remote;  // workers may be asked: there is a background thread
  AtomicStats stats;
  LogLimit lines;

  Mutex mutex;
  Fleet fleet KVASIR_GUARDED_BY(mutex);
  HotSet hot KVASIR_GUARDED_BY(mutex);  // layers by recipe id
  std::deque<Slot> slots KVASIR_GUARDED_BY(mutex);  // as many as the fleet has
  // The next table, until the background thread has seen it.
  std::optional<std::vector<WorkerAddress>> wanted KVASIR_GUARDED_BY(mutex);
  bool table_known KVASIR_GUARDED_BY(mutex) = false;  // it has seen the first
  std::vector<Served> departed KVASIR_GUARDED_BY(mutex);  // of workers that left the table, until somebody asks
  std::vector<std::shared_ptr<Port>> ports KVASIR_GUARDED_BY(mutex);
  std::deque<LayerEntry> layers KVASIR_GUARDED_BY(mutex);
  bool first_wait_done KVASIR_GUARDED_BY(mutex) = false;  // the configured workers have had their time to connect

  Bell bell;  // wakes the background thread
  std::atomic<bool> stop{false};
};

}  // namespace kvasir::dispatch
