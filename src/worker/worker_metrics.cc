// A worker's counters for Prometheus; docs/metrics.md has the list.

#include <algorithm>

#include "base/metrics.h"
#include "worker/worker_stats.h"

namespace kvasir::worker {

std::string WorkerStats::to_metrics(const ComputeGate& gate, std::uint64_t held_bytes,
                                    std::string_view software) const {
  const auto number = [](std::uint64_t value) { return static_cast<double>(value); };
  const TimePoint now = monotonic_now();
  MetricsText out;
  out.gauge("kvasir_worker_info", "The version that runs.", 1, {{"version", software}});
  out.gauge("kvasir_worker_connections", "Open connections of backbones.", number(connections_open));
  out.counter("kvasir_worker_connections_total", "Connections taken.", number(connections_total));
  out.counter("kvasir_worker_connections_refused_total", "Connections refused.", number(connections_refused));
  out.family("kvasir_worker_requests_total", MetricsText::Type::kCounter, "Requests by outcome.");
  out.sample(number(requests), {{"outcome", "answered"}});
  const std::uint64_t refused = requests_refused, busy = std::min<std::uint64_t>(requests_busy, refused);
  out.sample(number(busy), {{"outcome", "busy"}});
  out.sample(number(refused - busy), {{"outcome", "refused"}});
  out.sample(number(requests_cancelled), {{"outcome", "cancelled"}});
  out.counter("kvasir_worker_requests_merged_total", "Requests computed along with another backbone's.", number(requests_merged));
  out.counter("kvasir_worker_pairs_total", "Uses of an expert by a token that were computed.", number(pairs));
  out.counter("kvasir_worker_compute_seconds_total", "Time spent computing them.", number(compute_ns) / 1e9);
  out.gauge("kvasir_worker_busy_ratio", "Share of the last second spent computing.",
            number(busy_permille(gate, now)) / 1000);
  out.gauge("kvasir_worker_queued_requests", "Requests that wait for their turn.", number(gate.waiting()));
  out.gauge("kvasir_worker_queued_seconds", "Time they are expected to take.",
            std::chrono::duration<double>(gate.waiting_time()).count());
  out.counter("kvasir_worker_received_bytes_total", "Bytes of requests' rows.", number(bytes_received));
  out.counter("kvasir_worker_sent_bytes_total", "Bytes of answers' rows.", number(bytes_sent));
  out.gauge("kvasir_worker_held_bytes", "Bytes of the experts held.", number(held_bytes));
  out.process();
  return out.text();
}

}  // namespace kvasir::worker
