// What a worker has done, for PONG, the log and --stats-file. Any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "worker/compute_gate.h"

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

  void count_compute(std::uint64_t n_pairs, Nanos took);
  // What the tuner measured, until requests show better.
  void set_pair_us(std::uint32_t us) { pair_us_.store(us, std::memory_order_relaxed); }
  // Microseconds a pair, recently; 0: not known yet.
  std::uint32_t pair_us() const { return pair_us_.load(std::memory_order_relaxed); }
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
  mutable std::mutex mutex_;
  std::array<Sample, kSamples> samples_{};
  std::size_t next_sample_ = 0;
  std::atomic<std::uint32_t> pair_us_ = 0;
};

}  // namespace kvasir::worker
