#include "sim/scenario.h"

#include <memory>
#include <vector>

namespace kvasir::sim {
namespace {

using namespace std::chrono_literals;

class Faults {
 public:
  Faults(World& world, std::vector<std::unique_ptr<Worker>>& workers)
      : world_(world), workers_(workers), mean_(world.between(20ms, 2s)) {
    world_.after(world_.between(0ms, 300ms), [this] { next(); });
  }
  void end() { ended_ = true; }

 private:
  // A property of a worker that holds for a while.
  void for_a_while(Worker& worker, std::function<void()> set) {
    set();
    world_.after(world_.between(10ms, 3s), [&worker] { worker.heal(); });
  }

  void next() {
    if (ended_) return;
    Worker& worker = *workers_[world_.rng.below(static_cast<std::uint32_t>(workers_.size()))];
    switch (world_.rng.below(17)) {
      case 0: worker.crash(world_.between(1ms, 4s)); break;
      case 1: worker.crash(world_.between(1ms, 50ms)); break;
      case 2: worker.stop_process(world_.between(1ms, 200ms)); break;
      case 3: worker.stop_process(world_.between(200ms, 8s)); break;
      case 4:
      case 5: worker.reset_some_connection(); break;
      case 6:
      case 7: worker.swallow_some_connection(); break;
      case 8: worker.slow_some_connection(world_.between(1ms, 300ms), world_.between(10ms, 5s)); break;
      case 9: worker.drain_and_restart(world_.between(1ms, 500ms)); break;
      case 10: worker.change_holdings(); break;
      case 11: for_a_while(worker, [&] { worker.slowness = 2 + 40 * world_.rng.unit(); }); break;
      case 12: for_a_while(worker, [&] { (world_.chance(0.5) ? worker.nan_chance : worker.overflow_chance) = 0.3; }); break;
      case 13: for_a_while(worker, [&] { (world_.chance(0.5) ? worker.damage_chance : worker.shape_chance) = 0.3; }); break;
      case 14: for_a_while(worker, [&] { worker.twice_chance = 0.5; worker.error_chance = 0.2; }); break;
      case 15: for_a_while(worker, [&] { worker.lie_chance = 0.1; }); break;
      default: for_a_while(worker, [&] { worker.lies_in_pongs = true; }); break;
    }
    world_.after(world_.between(0ms, 2 * mean_), [this] { next(); });
  }

  World& world_;
  std::vector<std::unique_ptr<Worker>>& workers_;
  const Nanos mean_;
  bool ended_ = false;
};

}  // namespace

Outcome run_scenario(std::uint64_t seed, Canary canary, bool verbose) {
  World world(seed, verbose);
  const std::size_t n_workers = 1 + world.rng.below(6);
  std::vector<std::unique_ptr<Worker>> workers;
  for (std::uint32_t w = 0; w < n_workers; ++w) workers.push_back(std::make_unique<Worker>(world, w));
  const std::uint32_t replicas = 1 + world.rng.below(3);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer)
    for (std::uint32_t expert = 0; expert < kExperts; ++expert)
      for (std::uint32_t r = 0; r < replicas; ++r) workers[world.rng.below(static_cast<std::uint32_t>(n_workers))]->hold(layer, expert);

  const Client::Plan plan{.n_drivers = 1 + world.rng.below(3),
                          .rounds_per_driver = 30 + world.rng.below(60),
                          .local_allowed = world.chance(0.75),
                          .input_has_nan = false};
  Client::Plan actual = plan;
  actual.lie_quarantine_max = std::chrono::minutes(10);
  actual.spot_check = world.chance(0.3) ? 1.0 : world.chance(0.5) ? 0.1 : 0.0;
  actual.input_has_nan = plan.local_allowed && world.chance(0.2);
  actual.weighted = world.chance(0.5);
  if (plan.local_allowed && world.chance(0.3)) {
    std::vector<std::uint8_t> hot(kExperts, 0);
    for (std::uint8_t& expert : hot) expert = world.chance(0.3);
    actual.hot = std::make_shared<const std::vector<std::uint8_t>>(std::move(hot));
  }
  world.trace("%zu workers, %u draws of a replica per expert, %zu drivers, local compute %s, %s", n_workers, replicas,
              plan.n_drivers, plan.local_allowed ? "allowed" : "off", actual.weighted ? "sums" : "rows per pair");
  Client client(world, workers, actual, seed ^ 0x5eed, canary);
  Faults faults(world, workers);
  world.run([&] { return client.finished(); });

  // Faults end. Every expert gets a holder again and quarantines (at most 10 minutes) run
  // out; some rounds let each driver find its dead links; from then on nothing may fail or be
  // computed locally.
  faults.end();
  for (auto& worker : workers) worker->heal_for_good();
  for (std::uint32_t layer = 0; layer < kLayers; ++layer)
    for (std::uint32_t expert = 0; expert < kExperts; ++expert) workers[expert % n_workers]->hold(layer, expert);
  for (auto& worker : workers) worker->announce();
  const auto rest = [&](Nanos time) {
    bool over = false;
    world.after(time, [&] { over = true; });
    world.run([&] { return over; });
  };
  const auto rounds = [&](std::size_t n) {
    client.more_rounds(n);
    world.run([&] { return client.finished(); });
  };
  rest(std::chrono::minutes(15));
  for (int i = 0; i < 4; ++i) {
    rounds(10);
    rest(std::chrono::minutes(2));
  }
  if (!actual.input_has_nan) client.demand_remote();
  rounds(5);
  const Totals totals = client.totals();
  if (!world.failed()) client.shut_down();
  return {world.failure(), world.steps(), totals};
}

}  // namespace kvasir::sim
