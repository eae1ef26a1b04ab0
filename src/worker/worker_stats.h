// What a worker has done, for PONG, the log and --stats-file. Any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/mutex.h"
#include "worker/compute_gate.h"
#include "worker/cost_model.h"

namespace kvasir::worker {

class WorkerStats {
 public:
  std::atomic<std::uint64_t> connections_open = 0;
  std::atomic<std::uint64_t> connections_total = 0;
  std::atomic<std::uint64_t> connections_refused = 0;
  std::atomic<std::uint64_t> requests = 0;          // answered with rows
  std::atomic<std::uint64_t> requests_merged = 0;   // of those, computed along with another's
  std::atomic<std::uint64_t> requests_refused = 0;  // answered with ERROR
  std::atomic<std::uint64_t> requests_busy = 0;     // of those, for a full queue or budget
  std::atomic<std::uint64_t> requests_cancelled = 0;
  std::atomic<std::uint64_t> pairs = 0;
  std::atomic<std::uint64_t> compute_ns = 0;
  std::atomic<std::uint64_t> bytes_received = 0;  // of EXEC payloads
  std::atomic<std::uint64_t> bytes_sent = 0;      // of RESULT rows

  CostModel costs;

  void count_compute(wire::Numerics numerics, std::size_t n_pairs, std::size_t n_experts, Nanos took);
  // Share of about the last second that the gate was held; sampled by the accept loop.
  void sample(const ComputeGate& gate, TimePoint now);
  std::uint32_t busy_permille(const ComputeGate& gate, TimePoint now) const;

  std::string to_json(const ComputeGate& gate, std::uint64_t held_bytes) const;
  // The same for Prometheus.
  std::string to_metrics(const ComputeGate& gate, std::uint64_t held_bytes, std::string_view software) const;

 private:
  struct Sample {
    TimePoint at{};
    Nanos held{};
  };
  static constexpr std::size_t kSamples = 5;
  static constexpr Nanos kSampleInterval = std::chrono::milliseconds(200);
  mutable Mutex mutex_;
  std::array<Sample, kSamples> samples_ KVASIR_GUARDED_BY(mutex_){};
  std::size_t next_sample_ KVASIR_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvasir::worker
