// One seed: a cluster, a schedule of faults, rounds, then a quiet time in which everything
// must have recovered.
#pragma once

#include <cstdint>
#include <string>

#include "sim/client.h"

namespace kvasir::sim {

struct Outcome {
  std::string failure;  // empty: every check held
  std::uint64_t steps = 0;
  Totals totals;
};

Outcome run_scenario(std::uint64_t seed, Canary canary, bool verbose);

}  // namespace kvasir::sim
