#include "sim/recovery.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "sim/client.h"

namespace kvasir::sim {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kSeeds = 60;
constexpr std::size_t kRounds = 300;  // of each driver, in each phase

struct Shares {  // of the pairs, as a multiple of a fair share
  double well = 0, slow = 0, after = 0;
  std::string failure;
};

Shares run(std::uint64_t seed) {
  World world(seed, false);
  const std::size_t n_workers = 2 + world.rng.below(3);
  std::vector<std::unique_ptr<Worker>> workers;
  for (std::uint32_t w = 0; w < n_workers; ++w) {
    Worker& worker = *workers.emplace_back(std::make_unique<Worker>(world, w));
    worker.heal_for_good();
    if (w > 0) worker.be_as_fast_as(*workers[0]);
    for (std::uint32_t layer = 0; layer < kLayers; ++layer)
      for (std::uint32_t expert = 0; expert < kExperts; ++expert) worker.hold(layer, expert);
  }
  const Client::Plan plan{.n_drivers = 1 + world.rng.below(2), .rounds_per_driver = kRounds, .local_allowed = world.chance(0.5),
                          .weighted = world.chance(0.5)};
  Client client(world, workers, plan, seed ^ 0x5eed, Canary::kNone);
  std::uint64_t before = 0, all_before = 0;
  const auto share = [&] {
    std::uint64_t all = 0;
    for (const auto& worker : workers) all += worker->pairs_answered;
    const std::uint64_t pairs = workers[0]->pairs_answered - before;
    const double of_all = static_cast<double>(pairs) / static_cast<double>(std::max<std::uint64_t>(all - all_before, 1));
    before = workers[0]->pairs_answered;
    all_before = all;
    return of_all * static_cast<double>(n_workers);
  };
  const auto rounds = [&](std::size_t n) {
    client.more_rounds(n);
    world.run([&] { return client.finished(); });
  };
  Shares shares;
  world.run([&] { return client.finished(); });
  shares.well = share();
  workers[0]->slowness = 10 + 30 * world.rng.unit();
  rounds(kRounds);
  shares.slow = share();
  workers[0]->heal();
  rounds(3 * kRounds);  // about a minute and a half, in which it is found to be quick again
  share();
  rounds(kRounds);
  shares.after = share();
  if (!world.failed()) client.shut_down();
  shares.failure = world.failure();
  return shares;
}

}  // namespace

bool measure_recovery() {
  std::vector<double> well, slow, after;
  bool good = true;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const Shares shares = run(seed);
    well.push_back(shares.well);
    slow.push_back(shares.slow);
    after.push_back(shares.after);
    if (!shares.failure.empty()) std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), shares.failure.c_str());
    // One of two that are equally fast may be the busier one for a while.
    const bool back = shares.after > 0.25;
    if (!back) std::printf("seed %llu: %.2f of a fair share after it was slow\n", static_cast<unsigned long long>(seed), shares.after);
    good &= back && shares.failure.empty();
  }
  const auto show = [](const char* name, std::vector<double>& values) {
    std::ranges::sort(values);
    std::printf("%-24s median %.2f, lowest %.2f of a fair share\n", name, values[values.size() / 2], values.front());
  };
  show("before it was slow", well);
  show("while it was slow", slow);
  show("a while later", after);
  return good;
}

}  // namespace kvasir::sim
