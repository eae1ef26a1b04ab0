// kvasir-sim: thousands of failure schedules against the real dispatch core.
//
//   kvasir-sim --seeds N [--first S]   runs seeds S … S+N-1, prints what failed
//   kvasir-sim --seed S -v             replays one, with every event
//   kvasir-sim --liars                 measures how soon a lying worker is found
//   kvasir-sim --recovery              a worker that was slow gets its share of the work back
//   kvasir-sim --canary                plants bugs and demands that the checks find each
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "sim/liars.h"
#include "sim/recovery.h"
#include "sim/scenario.h"

namespace {

using namespace kvasir::sim;

int run_seeds(std::uint64_t first, std::uint64_t n) {
  const auto start = std::chrono::steady_clock::now();
  Totals sum;
  std::uint64_t failed = 0, steps = 0;
  for (std::uint64_t seed = first; seed < first + n; ++seed) {
    const Outcome outcome = run_scenario(seed, Canary::kNone, false);
    steps += outcome.steps;
    sum.rounds += outcome.totals.rounds;
    sum.failed_rounds += outcome.totals.failed_rounds;
    sum.pairs_remote += outcome.totals.pairs_remote;
    sum.pairs_local += outcome.totals.pairs_local;
    sum.hedges += outcome.totals.hedges;
    sum.late += outcome.totals.late;
    sum.invalid += outcome.totals.invalid;
    sum.redispatched += outcome.totals.redispatched;
    sum.sums_dropped += outcome.totals.sums_dropped;
    if (outcome.failure.empty()) continue;
    ++failed;
    std::printf("seed %llu: %s\n  replay: kvasir-sim --seed %llu -v\n", static_cast<unsigned long long>(seed),
                outcome.failure.c_str(), static_cast<unsigned long long>(seed));
  }
  const auto ull = [](std::uint64_t value) { return static_cast<unsigned long long>(value); };
  std::printf("%llu seeds, %llu failed; %llu rounds (%llu refused for want of a replica), %llu pairs remote, %llu local, "
              "%llu hedges, %llu experts placed anew, %llu late, %llu invalid answers, %llu sums dropped; %llu events in %.1f s\n",
              ull(n), ull(failed), ull(sum.rounds), ull(sum.failed_rounds), ull(sum.pairs_remote), ull(sum.pairs_local),
              ull(sum.hedges), ull(sum.redispatched), ull(sum.late), ull(sum.invalid), ull(sum.sums_dropped), ull(steps),
              std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  return failed == 0 ? 0 : 1;
}

int run_canaries() {
  constexpr struct {
    Canary canary;
    const char* name;
  } kCanaries[] = {{Canary::kWrongRow, "a changed answer"},
                   {Canary::kLateRowTaken, "a late answer taken"},
                   {Canary::kSumTwice, "a sum counted twice"},
                   {Canary::kLeak, "a leaked request"},
                   {Canary::kNoDeadline, "deadlines ignored"}};
  constexpr std::uint64_t kSeeds = 60;
  int missed = 0;
  for (const auto& [canary, name] : kCanaries) {
    std::uint64_t found = 0;
    for (std::uint64_t seed = 1; seed <= kSeeds && found == 0; ++seed)
      if (!run_scenario(seed, canary, false).failure.empty()) found = seed;
    std::printf("canary '%s': %s\n", name, found != 0 ? "found" : "NOT FOUND");
    missed += found == 0;
  }
  return missed == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t first = 1, n = 0, one = 0;
  bool verbose = false, canary = false, liars = false, recovery = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    const bool has_value = i + 1 < argc;
    if (arg == "--seeds" && has_value) n = std::strtoull(argv[++i], nullptr, 10);
    else if (arg == "--first" && has_value) first = std::strtoull(argv[++i], nullptr, 10);
    else if (arg == "--seed" && has_value) one = std::strtoull(argv[++i], nullptr, 10);
    else if (arg == "-v") verbose = true;
    else if (arg == "--canary") canary = true;
    else if (arg == "--liars") liars = true;
    else if (arg == "--recovery") recovery = true;
    else n = 0, one = 0, canary = liars = recovery = false, i = argc;
  }
  if (canary) return run_canaries();
  if (liars) return measure_liars() ? 0 : 1;
  if (recovery) return measure_recovery() ? 0 : 1;
  if (one != 0) {
    const Outcome outcome = run_scenario(one, Canary::kNone, verbose);
    std::printf("seed %llu: %s\n", static_cast<unsigned long long>(one), outcome.failure.empty() ? "ok" : outcome.failure.c_str());
    return outcome.failure.empty() ? 0 : 1;
  }
  if (n != 0) return run_seeds(first, n);
  std::fprintf(stderr, "usage: kvasir-sim --seeds N [--first S] | --seed S [-v] | --liars | --recovery | --canary\n");
  return 2;
}
