// What a layer round costs beside its compute: a round of the real dispatcher against an echo of the
// same bytes, over the same kind of stream, in one process and in turn.
//
// One row through `top_k` experts that answer at once, without computing: exact (f32, one row back
// for each pair) or fast with f16 sums (one row each way).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/error.h"

namespace kvasir::dispatch {

enum class RoundForm { kExact, kF16Sums };

struct RoundBench {
  RoundForm form = RoundForm::kExact;
  bool tls = false;
  Nanos gap{};  // of idleness before each round: a decoding backbone computes its dense part there
  Nanos spin = std::chrono::microseconds(50);  // of both sides' near end, before they sleep
  std::uint32_t n_embd = 3072, top_k = 8;
  std::uint32_t rounds = 4000;
};

struct RoundFigures {
  std::size_t bytes_out = 0, bytes_back = 0;  // of a round, without TLS's own
  double round_p50_us = 0, round_p99_us = 0, echo_p50_us = 0, echo_p99_us = 0;
  double over_echo_us() const { return round_p50_us - echo_p50_us; }
};

Result<RoundFigures> measure_round(const RoundBench& bench);
// All of it as one JSON object, without a line's end.
std::string to_json(const RoundBench& bench, const RoundFigures& figures);

std::string_view to_string(RoundForm form);

}  // namespace kvasir::dispatch
