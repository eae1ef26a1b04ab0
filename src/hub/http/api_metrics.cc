// The hub's figures for Prometheus; docs/metrics.md has the list.

#include <array>
#include <format>
#include <map>

#include "base/metrics.h"
#include "hub/http/hub.h"
#include "hub/http/server.h"
#include "hub/http/view_channel.h"

namespace kvasir::hub {
namespace {

using Type = MetricsText::Type;

struct ModelFigures {
  std::uint64_t experts = 0, at_target = 0, unheld = 0, missing = 0;
  std::map<std::string_view, std::uint64_t> workers;  // by state
};

struct CounterMetric {
  Counter counter;
  std::string_view name, help, label, value;
  double scale = 1;
};
// Samples of one family follow each other.
constexpr std::array<CounterMetric, 11> kCounterMetrics = {{
    {Counter::kRounds, "kvasir_hub_rounds_total", "MoE layers computed by backbones, as they report.", "", ""},
    {Counter::kRoundNs, "kvasir_hub_round_seconds_total", "Wall time that backbones spent in rounds.", "", "", 1e-9},
    {Counter::kPairsRemote, "kvasir_hub_pairs_total", "Uses of an expert by a token, by where they were computed.",
     "where", "remote"},
    {Counter::kPairsLocal, "kvasir_hub_pairs_total", "", "where", "local"},
    {Counter::kBytesSent, "kvasir_hub_wire_bytes_total", "Bytes between backbones and workers, as backbones see them.",
     "direction", "sent"},
    {Counter::kBytesReceived, "kvasir_hub_wire_bytes_total", "", "direction", "received"},
    {Counter::kHedges, "kvasir_hub_hedges_total", "Requests repeated at a second worker.", "", ""},
    {Counter::kLateAnswers, "kvasir_hub_late_answers_total", "Answers that nobody waited for any more.", "", ""},
    {Counter::kInvalidAnswers, "kvasir_hub_invalid_answers_total", "Answers that were wrong.", "", ""},
    {Counter::kWorkersLost, "kvasir_hub_connections_lost_total", "Connections to workers that ended unasked.", "", ""},
    {Counter::kReconnects, "kvasir_hub_reconnects_total", "Connections to workers made again.", "", ""},
}};

std::string metrics_text(Hub& hub, TimePoint now) {
  MetricsText out;
  out.gauge("kvasir_hub_info", "The version that runs.", 1, {{"version", hub.options().version}});

  std::map<std::string, ModelFigures> models;
  std::size_t n_reservations = 0;
  hub.with_market([&](Market& market) {
    market.advance(now);
    n_reservations = market.reservation_count();
    for (const ModelShape* shape : market.models()) {
      ModelFigures& figures = models[shape->name];
      for (const Run& run : market.demand(shape->name, now)) {
        figures.experts += run.size();
        if (run.held >= run.target)
          figures.at_target += run.size();
        else
          figures.missing += std::uint64_t{run.target - run.held} * run.size();
        if (run.held == 0) figures.unheld += run.size();
      }
    }
    market.for_each_node(now, [&](const NodeView& node) {
      ++models[node.model].workers[state_of(node, hub.options().market.heartbeat)];
    });
  });
  const auto by_model = [&](std::string_view name, std::string_view help, std::uint64_t ModelFigures::*field) {
    out.family(name, Type::kGauge, help);
    for (const auto& [model, figures] : models) out.sample(static_cast<double>(figures.*field), {{"model", model}});
  };
  by_model("kvasir_hub_experts", "Experts of the model.", &ModelFigures::experts);
  by_model("kvasir_hub_experts_at_target", "Experts with as many replicas as they should have.",
           &ModelFigures::at_target);
  by_model("kvasir_hub_experts_unheld", "Experts that no worker holds.", &ModelFigures::unheld);
  by_model("kvasir_hub_replicas_missing", "Replicas missing to the targets.", &ModelFigures::missing);
  out.family("kvasir_hub_workers", Type::kGauge, "Workers by state.");
  for (const auto& [model, figures] : models)
    for (const auto& [state, n] : figures.workers)
      out.sample(static_cast<double>(n), {{"model", model}, {"state", state}});
  out.gauge("kvasir_hub_reservations", "Ranges promised to workers that fetch them.",
            static_cast<double>(n_reservations));

  std::map<std::string, std::pair<Counters, std::size_t>> traffic;
  for (const auto& [model, figures] : models)
    hub.with_traffic(model, [&](Traffic& t) { traffic[model] = {t.totals(), t.backbones(now)}; });
  out.family("kvasir_hub_backbones", Type::kGauge, "Backbones that report.");
  for (const auto& [model, figures] : traffic) out.sample(static_cast<double>(figures.second), {{"model", model}});
  for (const CounterMetric& metric : kCounterMetrics) {
    if (!metric.help.empty()) out.family(metric.name, Type::kCounter, metric.help);
    for (const auto& [model, figures] : traffic) {
      const double value = static_cast<double>(figures.first[static_cast<std::size_t>(metric.counter)]) * metric.scale;
      if (metric.label.empty())
        out.sample(value, {{"model", model}});
      else
        out.sample(value, {{"model", model}, {metric.label, metric.value}});
    }
  }

  const ServerStats server = hub.server_stats();
  out.gauge("kvasir_hub_http_connections", "Open connections.", static_cast<double>(server.connections));
  out.gauge("kvasir_hub_http_downloads", "Slices on their way.", static_cast<double>(server.downloads));
  out.counter("kvasir_hub_http_requests_total", "Requests taken.", static_cast<double>(server.requests));
  out.counter("kvasir_hub_http_sent_bytes_total", "Bytes sent of slices and event streams.",
              static_cast<double>(server.bytes_sent));
  out.gauge("kvasir_hub_relay_waiting", "Workers' sockets that wait at the relay.", static_cast<double>(server.relay.waiting));
  out.gauge("kvasir_hub_relay_pairs", "Connections that pass the relay.", static_cast<double>(server.relay.pairs));
  out.gauge("kvasir_hub_pages", "Dashboards and terminals that follow.", static_cast<double>(hub.view().followers()));
  out.gauge("kvasir_hub_lines", "Workers with an open line.", static_cast<double>(hub.lines));
  out.process();
  return out.text();
}

}  // namespace

void add_metrics_route(Router& router, Hub& hub) {
  router.add({.method = "GET",
              .pattern = "/metrics",
              .summary = "Figures in Prometheus' text form",
              .scopes = hub.options().public_view ? std::vector<Scope>() : std::vector<Scope>{Scope::kViewer},
              .query = {},
              .body_example = {},
              .answer_example = {},
              .handler = [&hub](const Request& request) {
                Response out;
                out.content_type = kMetricsContentType;
                out.text = metrics_text(hub, request.now);
                return out;
              }});
}

}  // namespace kvasir::hub
