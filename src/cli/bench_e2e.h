// kvasir bench e2e: a whole model through llama-bench, stock and over workers, in turn.
#pragma once

#include <string>
#include <vector>

#include "base/error.h"

namespace kvasir::cli {

struct BenchE2eOptions {
  std::string model;
  // stock, no-repack (stock with --repack 0), rpc (llama.cpp's RPC, experts only), exact, fast.
  std::vector<std::string> sides{"stock", "no-repack", "rpc", "exact", "fast"};
  int n_workers = 2;  // each holds every expert
  int n_threads = 2;  // of every process
  int n_prompt = 512, n_decode = 32;
  int runs = 3;  // of every side, alternating
  bool json = false;
};

Status bench_e2e(const BenchE2eOptions& options);

}  // namespace kvasir::cli
