#include "dispatch/dispatcher.h"

#include <random>
#include <set>
#include <utility>

#include "base/check.h"
#include "dispatch/client/background.h"
#include "dispatch/client/driver.h"
#include "dispatch/client/shared.h"
#include "dispatch/client/upload.h"

namespace kvasir::dispatch {
namespace {

// A worker named twice is still one: as its own replica it would be hedged against itself.
std::vector<WorkerAddress> distinct(std::vector<WorkerAddress> workers) {
  std::vector<WorkerAddress> out;
  std::set<std::string> known;
  for (WorkerAddress& worker : workers)
    if (known.insert(worker_name(worker)).second) out.push_back(std::move(worker));
  return out;
}

class DispatcherImpl final : public Dispatcher {
 public:
  explicit DispatcherImpl(std::unique_ptr<Shared> shared) : shared_(std::move(shared)), uploader_(*shared_) {}

  Status start() {
    if (!shared_->remote) return {};
    KVASIR_ASSIGN(background_, Background::start(*shared_));
    return {};
  }

  const Layer& register_layer(const wire::LayerId& id, std::uint32_t layer, const wire::Recipe& recipe,
                              std::uint64_t expert_bytes) override {
    const MutexLock lock(shared_->mutex);
    for (const LayerEntry& entry : shared_->layers)
      if (entry.layer_id == id && entry.recipe == recipe) return entry;
    LayerEntry& entry = shared_->layers.emplace_back();
    entry.recipe_id = static_cast<std::uint32_t>(shared_->layers.size() - 1);
    entry.layer_id = id;
    entry.layer = layer;
    entry.recipe = recipe;
    shared_->hot.add_layer(entry.recipe_id, recipe.n_expert, expert_bytes);
    entry.uses = std::make_unique<std::atomic<std::uint64_t>[]>(recipe.n_expert);
    return entry;
  }

  bool any_holds(const wire::LayerId& id, wire::ExpertGroup group) override {
    return background_ != nullptr && uploader_.any_holds({id, group});
  }

  void upload_missing(const Layer& layer, const SliceMaker& slices) override {
    if (background_ != nullptr) uploader_.upload_missing(layer, slices);
  }

  std::unique_ptr<RoundDriver> make_driver() override {
    // Without a descriptor for its mailbox a driver gets no links, and computes locally.
    Result<Bell> bell = Bell::create();
    if (!bell) shared_->log(bell.error().message);
    auto port = std::make_shared<Port>(bell ? *std::move(bell) : Bell());
    if (bell) {
      const MutexLock lock(shared_->mutex);
      shared_->ports.push_back(port);
    }
    shared_->bell.ring();
    return std::make_unique<Driver>(*shared_, std::move(port));
  }

  Stats stats() const override {
    const AtomicStats& s = shared_->stats;
    Stats out{.rounds = s.rounds,
              .pairs_remote = s.pairs_remote,
              .pairs_local = s.pairs_local,
              .bytes_sent = s.bytes_sent,
              .bytes_received = s.bytes_received,
              .hedges = s.hedges,
              .late_answers = s.late_answers,
              .invalid_answers = s.invalid_answers,
              .workers_lost = s.workers_lost,
              .reconnects = s.reconnects,
              .round_ns_sum = s.round_ns_sum,
              .spot_pairs = s.spot_pairs,
              .spot_wrong = s.spot_wrong,
              .spot_unanswered = s.spot_unanswered,
              .spot_undecided = s.spot_undecided,
              .spot_ns_sum = s.spot_ns_sum,
              .rounds_busy = s.rounds_busy};
    const MutexLock lock(shared_->mutex);
    out.workers_up = shared_->fleet.count_up();
    out.hot_bytes = shared_->hot.bytes();
    return out;
  }

  void set_workers(std::vector<WorkerAddress> workers) override {
    KVASIR_CHECK(shared_->options.workers_follow);
    std::vector<WorkerAddress> table = distinct(std::move(workers));
    if (table.size() > kWorkersMax) {
      shared_->log("the list has " + std::to_string(table.size()) + " workers; the first " + std::to_string(kWorkersMax) +
                   " of them are used.");
      table.resize(kWorkersMax);
    }
    {
      const MutexLock lock(shared_->mutex);
      shared_->wanted = std::move(table);
    }
    shared_->bell.ring();
  }

  std::vector<Served> take_served() override {
    const MutexLock lock(shared_->mutex);
    std::vector<Served> out = std::exchange(shared_->departed, {});
    for (WorkerIndex w = 0; w < shared_->fleet.size(); ++w)
      if (const Service service = shared_->fleet.take_service(w); !service.empty())
        out.push_back({served_id(shared_->slots[w]), service.pairs, service.rows, service.bytes});
    return out;
  }

  std::vector<LayerUses> take_uses() override {
    const MutexLock lock(shared_->mutex);
    std::vector<LayerUses> out;
    for (const LayerEntry& entry : shared_->layers) {
      LayerUses uses{entry.layer_id, entry.layer, entry.recipe.group, {}};
      uses.uses.resize(entry.recipe.n_expert);
      bool any = false;
      for (std::uint32_t e = 0; e < entry.recipe.n_expert; ++e)
        any |= (uses.uses[e] = entry.uses[e].exchange(0, std::memory_order_relaxed)) > 0;
      if (any) out.push_back(std::move(uses));
    }
    return out;
  }

  std::vector<LayerTimes> layer_times() const override {
    const MutexLock lock(shared_->mutex);
    std::vector<LayerTimes> out;
    for (const LayerEntry& entry : shared_->layers) {
      LayerTimes& times = out.emplace_back();
      times.layer_id = entry.layer_id;
      times.layer = entry.layer;
      times.group = entry.recipe.group;
      for (std::size_t i = 0; i < times.rounds.size(); ++i) times.rounds[i] = entry.rounds[i].load(std::memory_order_relaxed);
      times.round_ns_sum = entry.round_ns_sum.load(std::memory_order_relaxed);
    }
    return out;
  }

  std::vector<WorkerView> workers() const override {
    const MutexLock lock(shared_->mutex);
    const Fleet& fleet = shared_->fleet;
    std::vector<WorkerView> out;
    for (WorkerIndex w = 0; w < fleet.size(); ++w) {
      if (fleet.state(w) == WorkerState::kRemoved) continue;
      const Tally& tally = fleet.tally(w);
      const bool refused = fleet.refused(w) && fleet.state(w) != WorkerState::kUp;
      const Slot& slot = shared_->slots[w];
      out.push_back({slot.where.id, slot.name, refused ? "refused" : to_string(fleet.state(w)), tally.answers,
                     tally.pairs, tally.time, tally.round_trip, fleet.failures(w)});
    }
    return out;
  }

 private:
  std::unique_ptr<Shared> shared_;
  Uploader uploader_;
  std::unique_ptr<Background> background_;  // after shared_: stops first
};

}  // namespace

Result<std::unique_ptr<Dispatcher>> Dispatcher::create(Options options) {
  if (options.workers.size() > kWorkersMax)
    return fix_input("more than " + std::to_string(kWorkersMax) + " workers are configured; use fewer.");
  if (options.numerics != wire::Numerics::kFast &&
      (options.row_type != wire::RowType::kF32 || options.result_type != wire::RowType::kF32))
    return fix_input("rows other than f32 change results; choose KVASIR_NUMERICS=fast with KVASIR_WIRE.");
  if (options.wire_auto && options.numerics != wire::Numerics::kFast)
    return fix_input("narrow rows change results; choose KVASIR_NUMERICS=fast with KVASIR_WIRE=auto.");
  options.workers = distinct(std::move(options.workers));
  Tuning tuning;
  tuning.no_replica_wait = options.no_replica_wait;
  tuning.hedge_floor = options.hedge_floor;
  tuning.final_floor = options.fallback_floor;
  tuning.deadline_ceiling = options.deadline_ceiling;
  tuning.hedge_earned_per_request = options.hedge_budget;
  tuning.spot_check = options.spot_check;
  if (tuning.hedge_floor < Nanos(0) || tuning.hedge_floor > tuning.deadline_ceiling ||
      tuning.final_floor > tuning.deadline_ceiling || options.hedge_budget < 0 || options.hedge_budget > 1)
    return fix_input("the deadlines must ascend (hedge, fallback, ceiling) and the hedge budget lie in [0, 1].");
  if (!(options.spot_check >= 0 && options.spot_check <= 1))
    return fix_input("the share of spot checks must lie in [0, 1]; set KVASIR_SPOT_CHECK, e.g. 0.005.");
  KVASIR_ASSIGN(Bell bell, Bell::create());
  // Which pairs are checked must be hidden from the workers: all 64 bits are drawn.
  std::random_device entropy;
  const std::uint64_t seed = std::uint64_t{entropy()} << 32 | entropy();
  auto shared = std::make_unique<Shared>(std::move(options), tuning, seed, std::move(bell));
  auto dispatcher = std::make_unique<DispatcherImpl>(std::move(shared));
  KVASIR_TRY(dispatcher->start());
  return dispatcher;
}

}  // namespace kvasir::dispatch
