// The tuner at a worker's start: measured on the slice it holds, once for a machine and a
// geometry, then read from a file.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ffn/tuner.h"
#include "worker/slice_store.h"

namespace kvasir::worker {

struct TuneOptions {
  std::string device = "CPU";
  int n_threads = 1;
  bool fast = true;  // false: only how fast class exact is
  std::string cache_file;  // empty: measure each time, keep nothing
  Nanos budget = std::chrono::milliseconds(4500);
};

struct WorkerTuning {
  ffn::Tuning tuning;
  bool cached = false;             // read, not measured
  std::vector<std::string> lines;  // what was chosen, for people
};

// Sets the engine's plans for class fast. nullopt: the store holds nothing to measure (on). A
// cache file that cannot be read or written costs the measurement only.
Result<std::optional<WorkerTuning>> tune_store(const SliceStore& store, ffn::Engine& engine, const TuneOptions& options);

}  // namespace kvasir::worker
