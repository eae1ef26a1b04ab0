// Dispatch: one call per MoE layer ("round") turns (rows, experts) into expert outputs,
// whatever the workers do meanwhile.
//
// A Dispatcher is one per process (plugin): it knows the workers, keeps one control
// connection to each (HELLO, HOLDINGS, PING) and the route table, on a thread of its own.
// A RoundDriver is one per ggml backend instance: its caller's thread drives the data
// connections of its own rounds. Dispatcher outlives its drivers.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "net/grant.h"
#include "net/websocket.h"
#include "wire/messages.h"

namespace kvasir::dispatch {

enum class LocalPolicy {
  kFallback,  // pairs no worker answers in time are computed here
  kNever,     // …fail the round
  kOnly,      // everything is computed here; workers are not contacted
};

struct WorkerAddress {
  std::string host;         // empty: only through the relay
  std::uint16_t port = 0;
  std::string fingerprint;  // pinned certificate, hex SHA-256; empty: none given
  std::string id{};         // who it is, whatever its address; empty: nobody says
  std::string token{};      // shown to this worker instead of Options::token
  std::string relay{};      // the session under which it waits at Options::relay; empty: it does not
  friend bool operator==(const WorkerAddress&, const WorkerAddress&) = default;
};
// "host:port", "relay:SESSION", or both as "host:port+relay:SESSION"; then "#fingerprint",
// without which a relayed worker is not used.
Result<WorkerAddress> parse_worker(std::string_view text);
// "worker,…"
Result<std::vector<WorkerAddress>> parse_workers(std::string_view text);

// Session grants of a hub, shown instead of a token where there is one.
struct GrantSource {
  net::SigningKey key;  // whose public key the grants name
  // The grant for that worker id, or empty; from several threads, must not block.
  std::function<std::string(const std::string& worker_id)> find;
  // That worker did not take its grant: on the next connection find() should give none, and the
  // worker is shown its token. From several threads, must not block; may be empty.
  std::function<void(const std::string& worker_id)> refused = {};
};

struct Options {
  std::vector<WorkerAddress> workers;
  // More may come by set_workers(); the first round then waits for its first call, too.
  bool workers_follow = false;
  std::string token;
  std::optional<GrantSource> grants;
  // The relay through which workers with a session are reached.
  std::optional<net::RelayOptions> relay;
  LocalPolicy local = LocalPolicy::kFallback;
  wire::Numerics numerics = wire::Numerics::kExact;
  wire::NumericsId numerics_id;
  // The first round waits this long for workers that are still connecting.
  Nanos connect_wait = std::chrono::seconds(5);
  // Without local compute, a round waits this long for a lost replica before it fails.
  Nanos no_replica_wait = std::chrono::seconds(10);
  // An answer is looked for this long without giving the processor away, because a sleeping
  // thread wakes slowly; 0 suits machines whose cores the workers need.
  Nanos spin = std::chrono::microseconds(50);
  // Bounds of the measured deadlines: before the first a second replica is never asked,
  // before the second nothing is computed here instead; past the ceiling nobody waits.
  Nanos hedge_floor = std::chrono::milliseconds(4);
  Nanos fallback_floor = std::chrono::milliseconds(1000);
  Nanos deadline_ceiling = std::chrono::seconds(60);
  // Requests to second replicas, as a share of all requests.
  double hedge_budget = 0.05;
  // Share of the pairs answered by workers that is computed a second time, in [0, 1]; new
  // workers are checked more often (core/reputation.h).
  double spot_check = 0.005;
  // How rows travel; other than f32 only with Numerics::kFast.
  wire::RowType row_type = wire::RowType::kF32;
  wire::RowType result_type = wire::RowType::kF32;
  bool wire_auto = false;  // f32 or f16, by what it saves and what it costs (core/wire_choice.h); with kFast
  // Experts used most are computed here while workers compute the others, within so many bytes.
  std::uint64_t hot_bytes_max = 0;
  // Lines for the user ("worker x:y lost: …; its pairs are computed elsewhere."); any thread.
  std::function<void(std::string)> log;
};

// Read at any time from any thread; each value is monotonic.
struct Stats {
  std::uint64_t rounds = 0;
  std::uint64_t pairs_remote = 0;
  std::uint64_t pairs_local = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes_received = 0;
  std::uint64_t hedges = 0;
  std::uint64_t late_answers = 0;      // answers nobody waited for any more
  std::uint64_t invalid_answers = 0;   // wrong shape, NaN, checksum
  std::uint64_t workers_lost = 0;      // connections that ended unasked
  std::uint64_t reconnects = 0;
  std::uint64_t round_ns_sum = 0;      // wall time inside rounds
  std::uint64_t spot_pairs = 0;        // computed a second time by spot checks
  std::uint64_t spot_wrong = 0;        // …and found wrong
  std::uint64_t spot_unanswered = 0;   // checks for which nobody could give a second answer
  std::uint64_t spot_undecided = 0;    // two workers disagreed and nobody could judge
  std::uint64_t spot_ns_sum = 0;       // local compute for them, part of round_ns_sum
  std::uint64_t workers_up = 0;        // gauge
  std::uint64_t hot_bytes = 0;         // gauge: of the experts computed here by choice
  std::uint64_t rounds_busy = 0;       // in which a worker had no room, or a long queue
};

// What one worker answered; pairs and rows of whole answers, bytes of all traffic with it.
struct Served {
  std::string id;  // WorkerAddress::id, else host:port
  std::uint64_t pairs = 0, rows = 0, bytes = 0;
};

// How often each expert of a layer was picked.
struct LayerUses {
  wire::LayerId layer_id{};
  std::uint32_t layer = 0;
  wire::ExpertGroup group = wire::ExpertGroup::kExps;
  std::vector<std::uint64_t> uses;  // by expert
};

// Wall time of one layer's rounds: bucket i counts rounds of [2^i, 2^(i+1)) nanoseconds.
struct LayerTimes {
  wire::LayerId layer_id{};
  std::uint32_t layer = 0;
  wire::ExpertGroup group = wire::ExpertGroup::kExps;
  std::array<std::uint64_t, 40> rounds{};
  std::uint64_t round_ns_sum = 0;
};

// One worker of the table, for people; counted since it entered the table.
struct WorkerView {
  std::string id;          // WorkerAddress::id
  std::string name;        // host:port
  std::string_view state;  // up, connecting, down, draining, quarantined, or refused: HELLO got an error
  std::uint64_t answers = 0, pairs = 0;
  Nanos answer_time_sum{};
  Nanos round_trip{};  // of the last ping; 0: none yet
  std::uint32_t failures = 0;  // attempts to reach it since it was last up
};

// The experts of one (layer, group), registered once; the handle is cheap to copy.
struct Layer {
  std::uint32_t recipe_id = 0;  // process-wide, also the wire's
  wire::LayerId layer_id{};
  std::uint32_t layer = 0;
  wire::Recipe recipe;
};

struct Round {
  const Layer* layer = nullptr;
  const float* rows = nullptr;     // row r at rows + r * row_stride
  std::size_t row_stride = 0;      // floats
  std::uint32_t n_rows = 0;
  std::span<const wire::Pair> pairs;  // experts are the model's ids, < recipe.n_expert
  // One finite weight per pair, in numerics fast only: the workers then answer with sums.
  // Empty: every pair's own output is wanted.
  std::span<const float> weights{};
  // Pair i at out + i * n_embd. With weights: row r at out + r * n_embd, the sum over its pairs
  // of weight * expert output; 0 for a row without pairs.
  float* out = nullptr;
  bool weighted() const { return !weights.empty(); }
};

// Computes `pairs[index]` for each index given into round.out; all uses of an expert that
// are missing are passed in one call, so that exact numerics hold. With weights: adds weight *
// output to the row's sum.
using LocalCompute = std::function<Status(const Round& round, std::span<const std::uint32_t> indices)>;

// How to hand the experts of a layer to a worker that offers memory.
struct SliceMaker {
  // The length of a slice is at most fixed_bytes + n * bytes_per_expert.
  std::uint64_t fixed_bytes = 0;
  std::uint64_t bytes_per_expert = 1;
  // A slice file's bytes (docs/slice-format.md) with these experts of the layer, under its id.
  std::function<Result<Bytes>(const ExpertSet& experts)> make;
};

// Work of the caller's own that does not need the round: called again and again while answers are
// on their way, until it says false (nothing is left). Pieces of well below a millisecond.
using Meanwhile = std::function<Result<bool>()>;

class RoundDriver {
 public:
  virtual ~RoundDriver() = default;
  // Returns when every pair's output is written, and `meanwhile` has said false; or the error that
  // fails the request.
  Status run(const Round& round, const LocalCompute& local) { return run(round, local, {}); }
  virtual Status run(const Round& round, const LocalCompute& local, const Meanwhile& meanwhile) = 0;
};

class Dispatcher {
 public:
  static Result<std::unique_ptr<Dispatcher>> create(Options options);
  virtual ~Dispatcher() = default;

  // `expert_bytes`: the weights of one expert; 0 where they are not to be used here by choice.
  virtual const Layer& register_layer(const wire::LayerId& id, std::uint32_t layer, const wire::Recipe& recipe,
                                      std::uint64_t expert_bytes = 0) = 0;
  // Whether a worker holds experts under this id. The first call gives workers connect_wait.
  virtual bool any_holds(const wire::LayerId& id, wire::ExpertGroup group) = 0;
  // Uploads the experts that no worker holds to those that offer memory. Returns when the
  // workers list them, or have failed: their pairs are then computed as if nobody held them.
  virtual void upload_missing(const Layer& layer, const SliceMaker& slices) = 0;
  virtual std::unique_ptr<RoundDriver> make_driver() = 0;

  // The table of workers from now on; only with Options::workers_follow. Those that are left
  // out finish what they were asked; those at another address, or with another certificate or
  // token, are connected anew. What cannot be used (more than kWorkersMax, a malformed
  // fingerprint) is logged and left out. Any thread.
  virtual void set_workers(std::vector<WorkerAddress> workers) = 0;
  // Since the last call; only what is not zero. Any thread.
  virtual std::vector<Served> take_served() = 0;
  virtual std::vector<LayerUses> take_uses() = 0;

  virtual Stats stats() const = 0;
  virtual std::vector<LayerTimes> layer_times() const = 0;
  virtual std::vector<WorkerView> workers() const = 0;
};

}  // namespace kvasir::dispatch
