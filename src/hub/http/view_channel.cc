#include "hub/http/view_channel.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "hub/http/hub.h"
#include "hub/http/json_input.h"

namespace kvasir::hub {
namespace {

using nlohmann::json;

// Four digits are enough for people, and equal figures make equal texts.
double rounded(double value) {
  if (value == 0 || !std::isfinite(value)) return 0;
  const double scale = std::pow(10, 3 - std::floor(std::log10(std::abs(value))));
  return std::round(value * scale) / scale;
}

std::string_view path_of(const NodeView& node) {
  if (node.url.empty()) return "none";
  if (node.url.starts_with("relay:")) return "relayed";
  return node.url.find("+relay:") == std::string::npos ? "direct" : "both";
}

json to_json(const Rates& rates, double pairs_per_token) {
  json out = {{"rounds", rounded(rates.rounds)},           {"pairs", rounded(rates.pairs)},
              {"local", rounded(rates.local_share())},     {"sent", rounded(rates.bytes_sent)},
              {"received", rounded(rates.bytes_received)}, {"hedges", rounded(rates.hedges)},
              {"round_ms", rounded(rates.round_ms())}};
  if (pairs_per_token > 0) out["tokens"] = rounded(rates.pairs / pairs_per_token);
  return out;
}

}  // namespace

std::string_view state_of(const NodeView& node, Nanos heartbeat) {
  if (node.lost) return "lost";
  if (node.draining) return "draining";
  if (node.since_seen > heartbeat * 3 / 2) return "late";
  if (node.moving) return "moving";
  if (node.experts_claimed == 0) return "fetching";
  return count_experts(node.counted) < node.experts_claimed ? "proving" : "serving";
}

struct ViewFeed::Channel::State {
  std::string model;  // empty: there is none
  bool known = false;
  json hello;
  std::vector<std::vector<Run>> runs;  // by layer
  json workers = json::array(), workers_with_addresses = json::array();
  std::size_t n_workers = 0;
  json traffic;
  std::vector<std::pair<std::uint64_t, json>> samples;
  json latency = json::array();
};

ViewFeed::Channel::State ViewFeed::Channel::look(Hub& hub) {
  State out;
  const TimePoint now = monotonic_now();
  const Nanos heartbeat = hub.options().market.heartbeat;
  std::vector<std::uint32_t> n_expert;
  json models = json::array();
  hub.with_market([&](Market& market) {
    market.advance(now);
    for (const ModelShape* model : market.models()) {
      models.push_back({{"name", model->name}, {"layers", model->n_expert.size()}, {"experts", model->n_expert_max()}});
      if (out.model.empty() && model_.empty()) out.model = model->name;
    }
    if (!model_.empty()) out.model = model_;
    const ModelShape* const shape = market.find_model(out.model);
    if (shape == nullptr) return;
    out.known = true;
    n_expert = shape->n_expert;
    out.runs.resize(n_expert.size());
    for (const Run& run : market.demand(out.model, now)) out.runs[run.layer].push_back(run);
    market.for_each_node(now, [&](const NodeView& node) {
      if (node.model != out.model || ++out.n_workers > kWorkersShownMax) return;
      json segments = json::array();
      for (const Segment& s : node.counted) segments.push_back({s.layer, s.begin, s.end});
      json worker = {{"id", node.worker_id},
                     {"state", state_of(node, heartbeat)},
                     {"device", node.device},
                     {"memory", node.capacity_bytes},
                     {"experts", count_experts(node.counted)},
                     {"speed", rounded(node.speed_rows_per_s)},
                     {"path", path_of(node)},
                     {"segments", segments}};
      out.workers.push_back(worker);
      worker["url"] = node.url;
      out.workers_with_addresses.push_back(std::move(worker));
    });
  });
  const HostedModelPtr hosted = hub.catalogue().find(out.model);
  const auto moe_layers = static_cast<double>(std::ranges::count_if(n_expert, [](std::uint32_t n) { return n > 0; }));
  const double pairs_per_token = hosted ? moe_layers * hosted->moe().n_expert_used() : 0;
  out.hello = {{"version", hub.options().version},
               {"models", std::move(models)},
               {"model", out.model},
               {"known", out.known},
               {"n_expert", n_expert},
               {"target", hub.options().market.target},
               {"sample_s", std::chrono::duration<double>(Traffic::kSampleInterval).count()}};
  out.traffic = json::object();
  if (!out.known) return out;
  hub.with_traffic(out.model, [&](Traffic& traffic) {
    traffic.advance(now);
    out.traffic = to_json(traffic.rates(now), pairs_per_token);
    out.traffic["backbones"] = traffic.backbones(now);
    for (const Traffic::Sample& sample : traffic.samples())
      out.samples.emplace_back(sample.number, to_json(sample.rates, pairs_per_token));
    for (const LayerLatency& layer : traffic.layers())
      out.latency.push_back({layer.layer, layer.rounds, rounded(layer.mean_us), rounded(layer.p99_us)});
    for (json* list : {&out.workers, &out.workers_with_addresses})
      for (json& worker : *list) {
        const auto& id = worker["id"].get_ref<const std::string&>();
        if (const auto latency_us = traffic.latency_us(id)) worker["latency_us"] = rounded(*latency_us);
        // Sooner than by heartbeats that stay away; what the hub itself has seen says more.
        if (worker["state"] == "serving" && traffic.is_silent(id, now)) worker["state"] = "silent";
      }
  });
  return out;
}

void ViewFeed::Channel::put(Text& text, std::string json_text) {
  if (text.version != 0 && text.json == json_text) return;
  text.json = std::move(json_text);
  text.version = version_;
}

void ViewFeed::Channel::refresh(Hub& hub) {
  const MutexLock one(refreshing_);
  State state = look(hub);
  const auto by_name = [](const json& a, const json& b) { return a["id"] < b["id"]; };
  std::sort(state.workers.begin(), state.workers.end(), by_name);
  std::sort(state.workers_with_addresses.begin(), state.workers_with_addresses.end(), by_name);
  const auto workers_text = [&](json& list) {
    return dump({{"total", state.n_workers}, {"workers", std::move(list)}});
  };
  std::vector<std::shared_ptr<Follower>> to_wake;
  {
    const MutexLock lock(mutex_);
    const std::uint64_t before = version_++;
    std::string hello = dump(state.hello);
    const bool another = hello_.version == 0 || state.model != shown_model_ || layers_.size() != state.runs.size();
    shown_model_ = state.model;
    if (another) {
      layers_.assign(state.runs.size(), {});
      runs_.assign(state.runs.size(), {});
      samples_.clear();
    }
    put(hello_, std::move(hello));
    for (std::size_t i = 0; i < state.runs.size(); ++i) {
      if (layers_[i].version != 0 && runs_[i] == state.runs[i]) continue;
      json runs = json::array();
      for (const Run& r : state.runs[i])
        runs.push_back({r.begin, r.end, r.held, r.reserved, r.target, rounded(r.scarcity())});
      runs_[i] = std::move(state.runs[i]);
      put(layers_[i], dump({i, runs}));
    }
    put(workers_, workers_text(state.workers));
    put(workers_with_addresses_, workers_text(state.workers_with_addresses));
    put(traffic_, dump(state.traffic));
    put(latency_, dump({{"layers", state.latency}}));
    for (auto& [number, sample] : state.samples)
      if (samples_.empty() || number > samples_.back().number) {
        sample["n"] = number;
        samples_.push_back({number, version_, dump(sample)});
      }
    while (samples_.size() > Traffic::kSamplesMax) samples_.pop_front();
    std::uint64_t newest = 0;
    for (const Text* text : {&hello_, &workers_, &workers_with_addresses_, &traffic_, &latency_})
      newest = std::max(newest, text->version);
    for (const Text& text : layers_) newest = std::max(newest, text.version);
    if (!samples_.empty()) newest = std::max(newest, samples_.back().version);
    if (newest <= before) {
      version_ = before;
      return;
    }
    composed_.clear();
    std::erase_if(followers_, [&](const std::weak_ptr<Follower>& weak) {
      std::shared_ptr<Follower> follower = weak.lock();
      if (follower == nullptr) return true;
      to_wake.push_back(std::move(follower));
      return false;
    });
  }
  for (const auto& follower : to_wake) follower->wake();
}

void ViewFeed::Channel::add(const std::shared_ptr<Follower>& follower) {
  const MutexLock lock(mutex_);
  followers_.push_back(follower);
}

bool ViewFeed::Channel::has_followers() {
  const MutexLock lock(mutex_);
  return std::ranges::any_of(followers_, [](const auto& follower) { return !follower.expired(); });
}

std::shared_ptr<const std::string> ViewFeed::Channel::events(std::uint64_t& from, bool with_addresses) {
  const MutexLock lock(mutex_);
  if (from == version_) return nullptr;
  // Nearly all followers stand at the same version: one text serves them.
  std::shared_ptr<const std::string>& text = composed_[{from, with_addresses}];
  if (text == nullptr) text = std::make_shared<const std::string>(compose(from, with_addresses));
  from = version_;
  return text->empty() ? nullptr : text;
}

std::string ViewFeed::Channel::compose(std::uint64_t from, bool with_addresses) const {
  std::string out;
  const auto event = [&out](std::string_view name, std::string_view data) {
    out.append("event: ").append(name).append("\ndata: ").append(data).append("\n\n");
  };
  const auto list = [](const auto& texts, std::uint64_t after) {
    std::string all;
    for (const auto& text : texts)
      if (text.version > after) all.append(all.empty() ? "" : ",").append(text.json);
    return all;
  };
  if (hello_.version > from) event("hello", hello_.json);
  if (const std::string layers = list(layers_, from); !layers.empty())
    event("coverage", std::string("{\"layers\":[").append(layers).append("]}"));
  const Text& workers = with_addresses ? workers_with_addresses_ : workers_;
  if (workers.version > from) event("workers", workers.json);
  if (traffic_.version > from) event("traffic", traffic_.json);
  if (const std::string samples = list(samples_, from); !samples.empty())
    event("samples", std::string("{\"samples\":[").append(samples).append("]}"));
  if (latency_.version > from) event("latency", latency_.json);
  return out;
}

}  // namespace kvasir::hub
