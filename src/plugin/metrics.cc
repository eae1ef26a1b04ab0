#include "plugin/metrics.h"

#include "base/metrics.h"

namespace kvasir::plugin {

std::string metrics_text(const dispatch::Stats& stats, std::uint64_t local_splits) {
  const auto number = [](std::uint64_t value) { return static_cast<double>(value); };
  MetricsText out;
  out.counter("kvasir_backbone_rounds_total", "MoE layers computed, one a layer and batch.", number(stats.rounds));
  out.counter("kvasir_backbone_round_seconds_total", "Wall time inside rounds.", number(stats.round_ns_sum) / 1e9);
  out.family("kvasir_backbone_pairs_total", MetricsText::Type::kCounter,
             "Uses of an expert by a token, by where they were computed.");
  out.sample(number(stats.pairs_remote), {{"where", "remote"}});
  out.sample(number(stats.pairs_local), {{"where", "local"}});
  out.family("kvasir_backbone_wire_bytes_total", MetricsText::Type::kCounter,
             "Bytes to and from workers, framing included.");
  out.sample(number(stats.bytes_sent), {{"direction", "sent"}});
  out.sample(number(stats.bytes_received), {{"direction", "received"}});
  out.counter("kvasir_backbone_hedges_total", "Requests repeated at a second worker.", number(stats.hedges));
  out.counter("kvasir_backbone_late_answers_total", "Answers that nobody waited for any more.",
              number(stats.late_answers));
  out.counter("kvasir_backbone_invalid_answers_total", "Answers that were wrong.", number(stats.invalid_answers));
  out.counter("kvasir_backbone_connections_lost_total", "Connections to workers that ended unasked.",
              number(stats.workers_lost));
  out.counter("kvasir_backbone_reconnects_total", "Connections to workers made again.", number(stats.reconnects));
  out.counter("kvasir_backbone_local_splits_total", "Pieces of the graph computed locally as a whole.",
              number(local_splits));
  out.gauge("kvasir_backbone_workers_up", "Workers connected now.", number(stats.workers_up));
  out.gauge("kvasir_backbone_hot_bytes", "Bytes of the experts computed at the backbone by choice.",
            number(stats.hot_bytes));
  out.process();
  return out.text();
}

}  // namespace kvasir::plugin
