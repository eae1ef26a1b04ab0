// The workers as all drivers of a process see them: health, measured speed, holdings, and
// the hedge budget they share. A state machine: time comes in with every event.
//
// Not synchronised: the client guards one Fleet with one mutex, taken twice a round.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "dispatch/core/latency.h"
#include "dispatch/core/reputation.h"
#include "dispatch/core/rng.h"
#include "dispatch/core/routes.h"
#include "dispatch/core/tuning.h"
#include "wire/messages.h"

namespace kvasir::dispatch {

enum class WorkerState : std::uint8_t {
  kConnecting,   // an attempt is under way
  kUp,
  kQuarantined,  // answered wrongly; asked nothing until the time is over
  kDraining,     // answers what it has, takes nothing new
  kDown,         // waiting for the next attempt
  kRemoved,      // no longer in the table; what it owes may still come
};
std::string_view to_string(WorkerState state);

// May a worker be given new work?
enum class Usable : std::uint8_t {
  kNo,
  kAvoid,  // only where no better replica is left
  kYes,
};

// What a driver learned in a round, told to the fleet at its end.
struct Report {
  enum class Kind : std::uint8_t { kAnswer, kTrial, kInvalid, kInternalError, kDraining, kLayerRefused, kForgotten, kVerified, kLied };
  Kind kind = Kind::kAnswer;
  WorkerIndex worker = 0;
  // kAnswer, kTrial, kForgotten: of the request that is no longer outstanding. kVerified, kLied: that a
  // spot check found right, or wrong.
  std::uint32_t pairs = 0;
  std::uint32_t rows = 0;   // kAnswer, kTrial, kForgotten: of the request, if it was answered in full; else 0
  Nanos latency{};          // kAnswer; kTrial: at most
  LayerKey layer{};         // kLayerRefused
};

// What a worker did for this process.
struct Service {
  std::uint64_t pairs = 0, rows = 0, bytes = 0;
  bool empty() const { return pairs == 0 && rows == 0 && bytes == 0; }
};

// What a worker's answers have cost since it entered the table.
struct Tally {
  std::uint64_t answers = 0, pairs = 0;
  Nanos time{};        // sum over the answers
  Nanos round_trip{};  // of the last ping; 0: none yet
};

class Fleet {
 public:
  Fleet(std::size_t n_workers, const Tuning& tuning, std::uint64_t seed);

  std::size_t size() const { return workers_.size(); }  // slots
  const Tuning& tuning() const { return tuning_; }
  Rng& rng() { return rng_; }

  // --- the table: slots of workers, which may come and go ---
  // A slot for one more: a released one, or a new one at the end. `before` is the slot under
  // which the same worker is known at another address: its quarantine goes with it.
  WorkerIndex add(std::optional<WorkerIndex> before = std::nullopt);
  // Asked for nothing from now on. Its slot stays taken until nobody has a link to it.
  void remove(WorkerIndex w);
  void release(WorkerIndex w);

  // --- the control connection's events ---
  // When the next attempt is due; nullopt while one is under way or succeeded.
  std::optional<TimePoint> next_attempt(WorkerIndex w) const;
  void on_connecting(WorkerIndex w);
  void on_connected(WorkerIndex w, Nanos round_trip);
  void on_lost(WorkerIndex w, TimePoint now);     // refused, reset, or pings unanswered
  void on_refused(WorkerIndex w, TimePoint now);  // HELLO was answered with an error
  void on_holdings(WorkerIndex w, wire::Holdings holdings);
  void on_pong(WorkerIndex w, const wire::Pong& pong, Nanos round_trip, TimePoint now);
  void on_draining(WorkerIndex w);
  // A data link stalled and was dropped; returns how long to wait before the next one.
  Nanos on_link_stalled(WorkerIndex w);

  // --- the drivers' events ---
  // Returns true if this report put the worker into quarantine.
  bool apply(const Report& report, TimePoint now);
  void on_sent(WorkerIndex w, std::uint32_t pairs);
  void on_bytes(WorkerIndex w, std::uint64_t bytes) { workers_[w].service.bytes += bytes; }
  // Since the last call.
  Service take_service(WorkerIndex w) { return std::exchange(workers_[w].service, {}); }
  // Counts `pairs` of an expert given to a worker; draws whether they are computed twice.
  bool draw_check(WorkerIndex w, std::uint32_t pairs);

  // --- questions ---
  WorkerState state(WorkerIndex w) const { return workers_[w].state; }
  // Attempts since the worker was last up, and whether its HELLO was refused.
  std::uint32_t failures(WorkerIndex w) const { return workers_[w].failures; }
  bool refused(WorkerIndex w) const { return workers_[w].refused; }
  const Tally& tally(WorkerIndex w) const { return workers_[w].tally; }
  std::size_t count_up() const;
  // Null until it has listed them.
  const wire::Holdings* holdings(WorkerIndex w) const { return workers_[w].holdings.get(); }
  std::uint32_t outstanding_pairs(WorkerIndex w) const { return workers_[w].outstanding_pairs; }
  Usable usable(WorkerIndex w, TimePoint now);
  const Reputation& reputation(WorkerIndex w) const { return workers_[w].reputation; }
  bool refuses_layer(WorkerIndex w, const LayerKey& key) const;
  std::shared_ptr<const RouteTable> routes() const { return routes_; }

  struct Deadlines {
    Nanos expected;  // the answer
    Nanos hedge;     // ask another replica
    Nanos final;     // stop waiting
    bool measured;   // `expected` comes from requests of about this size
  };
  // For a request of `pairs` sent now on top of what is outstanding.
  Deadlines deadlines(WorkerIndex w, std::uint32_t pairs, TimePoint now) const;
  bool is_measured(WorkerIndex w) const { return workers_[w].latency.samples() > 0; }
  // Whether a copy of a request should go to this worker, which was passed over as the slower of
  // two: what is known of it is old. True once, then not for a while.
  bool begin_trial(WorkerIndex w, TimePoint now);
  // Would `pairs` more wait there at least as long as they take?
  bool is_busy(WorkerIndex w, std::uint32_t pairs, TimePoint now) const;
  // Expected time until `pairs` more would be answered; for choosing.
  Nanos predicted_finish(WorkerIndex w, std::uint32_t pairs, TimePoint now) const;
  // The same at least: a size that it was never asked for may turn out to take no longer than a smaller one.
  Nanos earliest_finish(WorkerIndex w, std::uint32_t pairs, TimePoint now) const;

  void earn_hedge();
  bool spend_hedge();
  double hedge_tokens() const { return hedge_tokens_; }

 private:
  struct Worker {
    WorkerState state = WorkerState::kDown;
    bool refused = false;
    bool control_up = false;   // the state to return to after quarantine
    std::uint32_t failures = 0;
    std::uint32_t stalls = 0;  // of data links, in a row
    TimePoint next_attempt{};
    TimePoint quarantine_until{};
    bool caught = false;             // quarantined for a lie
    Nanos quarantine{};              // length of the last one; 0: never
    std::uint32_t probation = 0;     // good answers still owed
    std::uint32_t internal_errors = 0;
    std::uint32_t outstanding_pairs = 0;
    Reputation reputation;           // outlasts reconnection
    LatencyModel latency;
    TimePoint renewed{};             // when it was measured, or tried, last
    Nanos trial_wait{};              // from then to the next trial; 0: trial_after
    Nanos queue_wait{};
    TimePoint queue_seen{};
    std::shared_ptr<const wire::Holdings> holdings;
    std::vector<LayerKey> refused_layers;  // until new holdings come
    Service service;
    Tally tally;
  };

  Nanos queue_wait(const Worker& worker, TimePoint now) const;
  Nanos jittered(Nanos base);
  void quarantine(Worker& worker, TimePoint now);
  void quarantine_until(Worker& worker, TimePoint until);
  void rebuild_routes();

  Tuning tuning_;
  Rng rng_;
  std::vector<Worker> workers_;
  std::vector<WorkerIndex> free_;  // released slots
  std::shared_ptr<const RouteTable> routes_;
  double hedge_tokens_;
};

}  // namespace kvasir::dispatch
