// What this machine's cores can do at best, to set a worker's figures against.
#pragma once

namespace kvasir::cli {

struct Ceilings {
  double read_gb_s = 0;     // reading memory far larger than the caches, huge pages where allowed
  double fma_gflop_s = 0;   // f32 multiply-adds in registers. Kernels on 8-bit products may pass it.
};

// Takes about a second on `n_threads` threads.
Ceilings measure_ceilings(int n_threads);

}  // namespace kvasir::cli
