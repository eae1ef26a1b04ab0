#include "worker/worker_stats.h"

#include <algorithm>
#include <format>

namespace kvasir::worker {

void WorkerStats::count_compute(wire::Numerics numerics, std::size_t n_pairs, std::size_t n_experts, Nanos took) {
  pairs += n_pairs;
  compute_ns += static_cast<std::uint64_t>(took.count());
  costs.observe(numerics, n_pairs, n_experts, took);
}

void WorkerStats::sample(const ComputeGate& gate, TimePoint now) {
  const MutexLock lock(mutex_);
  if (now - samples_[(next_sample_ + kSamples - 1) % kSamples].at < kSampleInterval) return;
  samples_[next_sample_] = {now, gate.held(now)};
  next_sample_ = (next_sample_ + 1) % kSamples;
}

std::uint32_t WorkerStats::busy_permille(const ComputeGate& gate, TimePoint now) const {
  const Nanos held = gate.held(now);
  const MutexLock lock(mutex_);
  const Sample& oldest = samples_[next_sample_];
  if (oldest.at == TimePoint{} || now <= oldest.at) return 0;
  return static_cast<std::uint32_t>(
      std::clamp<std::int64_t>((held - oldest.held).count() * 1000 / (now - oldest.at).count(), 0, 1000));
}

std::string WorkerStats::to_json(const ComputeGate& gate, std::uint64_t held_bytes) const {
  std::string json = "{";
  const auto put = [&](std::string_view name, std::uint64_t value) {
    json += std::format("{}\"{}\": {}", json.size() > 1 ? ", " : "", name, value);
  };
  put("connections_open", connections_open);
  put("connections_total", connections_total);
  put("connections_refused", connections_refused);
  put("requests", requests);
  put("requests_merged", requests_merged);
  put("requests_refused", requests_refused);
  put("requests_busy", requests_busy);
  put("requests_cancelled", requests_cancelled);
  put("pairs", pairs);
  put("compute_us", compute_ns / 1000);
  put("pair_us", costs.pair_us());
  put("busy_permille", busy_permille(gate, monotonic_now()));
  put("queued", gate.waiting());
  put("queued_us", static_cast<std::uint64_t>(gate.waiting_time().count() / 1000));
  put("bytes_received", bytes_received);
  put("bytes_sent", bytes_sent);
  put("held_bytes", held_bytes);
  return json + "}\n";
}

}  // namespace kvasir::worker
