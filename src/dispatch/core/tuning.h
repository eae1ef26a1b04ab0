// Every limit and rate of dispatch, in one place. Defaults are for people's own machines,
// where a pause of some milliseconds is the scheduler's and not a fault.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/clock.h"

namespace kvasir::dispatch {

inline constexpr std::uint32_t kWorkersMax = 1024;
inline constexpr std::uint32_t kTriesMax = 8;            // workers asked for one expert in one round
inline constexpr std::uint32_t kUnansweredMax = 64;      // abandoned requests remembered on a link
inline constexpr std::uint32_t kRoundPairsMax = 1u << 24;  // pairs in one round

struct Tuning {
  // --- deadlines of a request ---
  // Past the first a second replica is asked too: quantile of (latency / prediction) x margin.
  double hedge_quantile = 0.95;
  double hedge_margin = 1.25;
  Nanos hedge_floor = std::chrono::milliseconds(4);
  // Past the second nobody waits any more. The floor is far above a busy machine's hiccups,
  // because what follows (local compute, maybe from a cold file) is dear.
  double final_quantile = 0.999;
  double final_margin = 3.0;
  Nanos final_floor = std::chrono::milliseconds(1000);
  Nanos deadline_ceiling = std::chrono::seconds(60);
  // A worker (or a size of request) without measurements; the control connection's pings
  // find a dead one much earlier.
  Nanos unmeasured_fixed = std::chrono::seconds(2);
  Nanos unmeasured_per_pair = std::chrono::milliseconds(10);

  // --- hedge budget: a token bucket ---
  double hedge_earned_per_request = 0.05;
  double hedge_burst = 16;

  // --- links ---
  // A link that owes an answer this long after its second deadline is replaced.
  Nanos stall_reconnect = std::chrono::seconds(2);
  Nanos backoff_first = std::chrono::milliseconds(50);
  Nanos backoff_max = std::chrono::seconds(4);  // a relay or network that returns is noticed in as long
  Nanos refused_backoff = std::chrono::seconds(30);

  // --- quarantine ---
  Nanos quarantine_first = std::chrono::seconds(10);
  Nanos quarantine_max = std::chrono::minutes(10);
  std::uint32_t probation_answers = 64;     // good answers that end probation
  std::uint32_t probation_one_in = 16;      // share of choices a worker on probation may win
  std::uint32_t internal_errors_max = 3;    // in a row, then quarantine

  // --- local compute ---
  // Answers that came while something longer was computed here say nothing about the worker's time.
  Nanos unread_max = std::chrono::milliseconds(2);

  // --- spot checks: see reputation.h ---
  double spot_check = 0;                    // share of pairs computed a second time; Options sets it
  double spot_new_factor = 10;              // for a new worker that share is so many times larger…
  std::uint64_t spot_new_pairs = 4000;      // …for its first pairs, twice as many after each offence
  std::uint32_t spot_new_doublings_max = 10;
  Nanos lie_quarantine_first = std::chrono::hours(1);
  Nanos lie_quarantine_max = std::chrono::hours(24);

  // --- new replicas ---
  // A worker without measurements is guessed to be slow, and would never be measured beside
  // one that is known to be quick: it gets this share of the choices that it is drawn in.
  std::uint32_t unmeasured_one_in = 16;

  // --- replicas that were slow once ---
  // The slower of two is asked nothing, so its estimate would stand for ever. One that is so old
  // is tried with a copy of a request, for whose answer no round waits; after a try that found
  // nothing better the next one comes twice as late, after one that did much earlier.
  Nanos trial_after = std::chrono::seconds(2);
  Nanos trial_again = std::chrono::milliseconds(250);
  Nanos trial_max = std::chrono::seconds(30);
  std::uint32_t trial_pairs_max = 256;

  // --- no local compute ---
  Nanos no_replica_wait = std::chrono::seconds(10);
  Nanos no_replica_retry = std::chrono::milliseconds(20);

  // PONG's queue length is believed this long.
  Nanos load_fresh = std::chrono::seconds(2);
};

}  // namespace kvasir::dispatch
