// kvasir bench dispatch: what a layer round costs beside its compute, over an echo of the same bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "base/error.h"

namespace kvasir::cli {

struct BenchDispatchOptions {
  std::vector<double> gaps_ms{0, 5};
  std::uint32_t n_embd = 3072, top_k = 8;
  std::uint32_t spin_us = 50;
  std::uint32_t rounds = 0;  // of each line; 0: 4000 without a gap, 400 with one
  bool json = false;
};

Status bench_dispatch(const BenchDispatchOptions& options);

}  // namespace kvasir::cli
