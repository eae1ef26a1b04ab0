// kvasir bench worker: the worker's engine beside naive ggml in one process, in alternating pairs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"

namespace kvasir::cli {

struct BenchWorkerOptions {
  std::string slice;  // empty: a synthetic layer of the figures below
  std::uint32_t n_expert = 64, n_used = 8, n_embd = 3072, n_ff = 1024;
  std::string types = "gate=Q4_K,up=Q4_K,down=Q6_K";
  std::vector<std::uint32_t> batches{1, 2, 4, 8, 16, 32, 64, 128, 256, 512};
  int n_threads = 0;  // 0: one a core
  int copies = 1;     // of the weights
  std::string numerics = "fast";
  int pairs = 10;
  bool json = false;
  std::string plot;  // SVG file
};

struct BenchRow {
  std::uint32_t batch = 0;
  double naive_tok_s = 0, tok_s = 0, ratio = 0, ms = 0;  // medians; of the pairs' own ratios
  double gflop_s = 0, gb_s = 0, of_memory = 0, of_compute = 0;
  std::string plan;
};

Status bench_worker(const BenchWorkerOptions& options);

// Tokens a second over the batch, both sides, on logarithmic axes.
Status write_plot(const std::string& file, const std::string& title, const std::vector<BenchRow>& rows);

}  // namespace kvasir::cli
