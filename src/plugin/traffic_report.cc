#include "plugin/traffic_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace kvasir::plugin {
namespace {

constexpr Nanos kTurn = std::chrono::seconds(15);  // times are of one to two of these
constexpr std::size_t kWorkersMax = 1000;          // as many as the hub's page shows

std::uint64_t count_rounds(const dispatch::LayerTimes& times) {
  std::uint64_t n = 0;
  for (const std::uint64_t rounds : times.rounds) n += rounds;
  return n;
}

// The upper end of the bucket in which that share of the rounds has ended, ns.
std::uint64_t quantile_ns(const dispatch::LayerTimes& times, std::uint64_t n_rounds, double share) {
  std::uint64_t seen = 0;
  for (std::size_t i = 0; i < times.rounds.size(); ++i) {
    seen += times.rounds[i];
    if (seen > 0 && static_cast<double>(seen) >= share * static_cast<double>(n_rounds)) return std::uint64_t{2} << i;
  }
  return 0;
}

// A dispatcher's layers only become more, in the same order.
dispatch::LayerTimes since(dispatch::LayerTimes times, const std::vector<dispatch::LayerTimes>& base, std::size_t i) {
  if (i >= base.size()) return times;
  for (std::size_t bucket = 0; bucket < times.rounds.size(); ++bucket) times.rounds[bucket] -= base[i].rounds[bucket];
  times.round_ns_sum -= base[i].round_ns_sum;
  return times;
}

// In the hub's words: a worker is down when it was asked for and did not answer.
std::string_view state_of(const dispatch::WorkerView& worker) {
  return worker.state == "connecting" && worker.failures > 0 ? "down" : worker.state;
}

}  // namespace

nlohmann::ordered_json counters_json(const dispatch::Stats& s) {
  return {
      {"rounds", s.rounds},
      {"pairs_remote", s.pairs_remote},
      {"pairs_local", s.pairs_local},
      {"bytes_sent", s.bytes_sent},
      {"bytes_received", s.bytes_received},
      {"hedges", s.hedges},
      {"late_answers", s.late_answers},
      {"invalid_answers", s.invalid_answers},
      {"workers_lost", s.workers_lost},
      {"reconnects", s.reconnects},
      {"round_ns_sum", s.round_ns_sum},
      {"spot_pairs", s.spot_pairs},
      {"spot_wrong", s.spot_wrong},
      {"spot_unanswered", s.spot_unanswered},
      {"spot_undecided", s.spot_undecided},
      {"spot_ns_sum", s.spot_ns_sum},
      {"workers_up", s.workers_up},
      {"hot_bytes", s.hot_bytes},
      {"rounds_busy", s.rounds_busy},
  };
}

nlohmann::ordered_json layer_times_json(const dispatch::LayerTimes& times) {
  const std::uint64_t n = count_rounds(times);
  return {{"layer", times.layer},
          {"group", times.group == wire::ExpertGroup::kExps ? "exps" : "chexps"},
          {"rounds", n},
          {"round_ns_sum", times.round_ns_sum},
          {"p50_ns_below", quantile_ns(times, n, 0.5)},
          {"p99_ns_below", quantile_ns(times, n, 0.99)}};
}

nlohmann::ordered_json TrafficReport::workers_json(const std::vector<dispatch::WorkerView>& workers) const {
  auto out = nlohmann::ordered_json::array();
  for (const dispatch::WorkerView& w : workers) {
    if (w.id.empty() || out.size() >= kWorkersMax) continue;
    const auto base = base_.workers.find(w.id);
    // It may have left the table and come again, and then counts anew.
    const bool grown = base != base_.workers.end() && base->second.first <= w.answers &&
                       base->second.second <= w.answer_time_sum;
    const std::uint64_t answers = w.answers - (grown ? base->second.first : 0);
    const Nanos time = w.answer_time_sum - (grown ? base->second.second : Nanos::zero());
    out.push_back({{"name", w.id}, {"state", state_of(w)}, {"answers", answers}, {"answer_ns_sum", time.count()}});
  }
  return out;
}

nlohmann::ordered_json TrafficReport::layers_json(const std::vector<dispatch::LayerTimes>& all,
                                                  const std::set<wire::LayerId>& layers) const {
  auto out = nlohmann::ordered_json::array();
  for (std::size_t i = 0; i < all.size(); ++i) {
    // A second group runs beside the leading one, under the same number.
    if (all[i].group != wire::ExpertGroup::kExps || !layers.contains(all[i].layer_id)) continue;
    const dispatch::LayerTimes recent = since(all[i], base_.layers, i);
    if (count_rounds(recent) > 0) out.push_back(layer_times_json(recent));
  }
  return out;
}

std::optional<nlohmann::ordered_json> TrafficReport::look(const dispatch::Dispatcher& dispatcher,
                                                          const std::set<wire::LayerId>& layers, TimePoint now) {
  const dispatch::Stats stats = dispatcher.stats();
  const std::vector<dispatch::WorkerView> workers = dispatcher.workers();
  std::string states;
  for (const dispatch::WorkerView& w : workers)
    if (!w.id.empty()) states.append(w.id).append(1, ' ').append(state_of(w)).append(1, '\n');
  const bool moved = stats.rounds != rounds_;
  // After the last round one report more, so that the hub shows no speed that is over.
  const Nanos interval = states != states_ ? kTrafficLook : moved || moving_ ? kTrafficInterval : kTrafficIdleInterval;
  if (sent_ && now - *sent_ < interval) return std::nullopt;

  std::vector<dispatch::LayerTimes> times = dispatcher.layer_times();
  nlohmann::ordered_json out = counters_json(stats);
  out["layers"] = layers_json(times, layers);
  out["workers"] = workers_json(workers);
  if (!turned_ || now - *turned_ >= kTurn) {
    if (turned_) base_ = std::move(next_base_);
    next_base_ = {std::move(times), {}};
    for (const dispatch::WorkerView& w : workers)
      if (!w.id.empty()) next_base_.workers[w.id] = {w.answers, w.answer_time_sum};
    turned_ = now;
  }
  sent_ = now;
  rounds_ = stats.rounds;
  moving_ = moved;
  states_ = std::move(states);
  return std::make_optional(std::move(out));
}

}  // namespace kvasir::plugin
