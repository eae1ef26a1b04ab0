// What is known of a worker's honesty, and how often its answers are computed a second time.
//
// A worker that lies in a share q of its pairs is found after about 1 / (share * q) of them:
// at the default share of 0.5 % and q = 1 % that is 20 000 pairs on average, half of them
// sooner than 13 900. A new worker, and one that was caught, is checked more often.
#pragma once

#include <cstdint>

#include "base/clock.h"
#include "dispatch/core/tuning.h"

namespace kvasir::dispatch {

struct Reputation {
  std::uint64_t pairs_asked = 0;
  std::uint64_t pairs_verified = 0;  // computed twice, and equal
  std::uint64_t pairs_wrong = 0;     // computed twice, and shown to be wrong
  std::uint64_t asked_in_standing = 0;  // since it was first seen, or caught last
  std::uint32_t offences = 0;
};

// Share of the worker's pairs to compute a second time, in [0, 1].
double check_share(const Reputation& reputation, const Tuning& tuning);

// How long a caught worker is left alone: doubles with each offence.
Nanos lie_quarantine(const Reputation& reputation, const Tuning& tuning);

}  // namespace kvasir::dispatch
