// What backbones ask and report: who serves what, which experts are used, how busy it is.

#include <format>

#include "hub/http/hub.h"
#include "hub/http/json_input.h"

namespace kvasir::hub {
namespace {

using nlohmann::json;

constexpr Nanos kLookAgain = std::chrono::milliseconds(250);
constexpr Nanos kQuotaLookAgain = std::chrono::seconds(5);
constexpr std::size_t kHeatLayersMax = 4096;
constexpr std::size_t kHeatExpertsMax = 65'536;
constexpr std::size_t kStatsWorkersMax = 4096;
constexpr std::size_t kBackboneNameBytesMax = 64;

Response json_response(const json& value) {
  Response out;
  out.text = dump(value);
  return out;
}

// A backbone that has used up its day gets an empty table, until the next one (UTC).
std::optional<Response> over_quota(Hub& hub, const Request& request, const std::string& since) {
  if (!request.principal.pairs_per_day) return std::nullopt;
  const auto used = hub.store().pairs_used(unix_now() / 86'400, request.principal.token_id);
  if (!used) {
    hub.log_error(used.error());
    return error_response(503, "the ledger cannot be read just now; try again in a moment.");
  }
  if (*used < *request.principal.pairs_per_day) return std::nullopt;
  const std::string version = hub.instance() + "-quota";
  Response out;
  if (since == version && !request.last_chance) {
    out.ask_again = kQuotaLookAgain;
    return out;
  }
  const std::string reason = std::format("this backbone has used up its {} pairs of the day; workers are there again at midnight UTC.",
                                         *request.principal.pairs_per_day);
  return json_response({{"version", version}, {"workers", json::array()}, {"reason", reason}});
}

// since=V waits until the table's version is no longer V, or for as long as the server allows.
Response routes(Hub& hub, const Request& request) {
  const auto parameter = [&](std::string_view name) {
    const auto found = request.query.find(name);
    return found == request.query.end() ? std::string() : found->second;
  };
  const std::string model = parameter("model"), since = parameter("since");
  if (auto answer = over_quota(hub, request, since)) return *std::move(answer);
  // An empty table would make backbones forget workers that still serve them.
  if (const Nanos wait = hub.wakes_in(request.now); wait > Nanos::zero()) return waking_response(wait);
  return hub.with_market([&](Market& market) {
    market.advance(request.now);
    const std::string version = std::format("{}-{}", hub.instance(), market.routes_version());
    if (!since.empty() && since == version && !request.last_chance) {
      Response wait;
      wait.ask_again = kLookAgain;
      return wait;
    }
    if (!model.empty() && market.find_model(model) == nullptr)
      return error_response(404, std::format("there is no model '{}' here; see /api/models.", model));
    json workers = json::array();
    market.for_each_node(request.now, [&](const NodeView& node) {
      if (node.counted.empty() || node.url.empty() || (!model.empty() && node.model != model)) return;
      json segments = json::array();
      for (const Segment& s : node.counted) segments.push_back({s.layer, s.begin, s.end});
      workers.push_back({{"worker_id", node.worker_id},
                         {"model", node.model},
                         {"url", node.url},
                         {"fingerprint", node.fingerprint},
                         {"ticket", node.ticket},
                         {"segments", segments},
                         {"speed", node.speed_rows_per_s},
                         {"draining", node.draining}});
    });
    return json_response({{"version", version}, {"workers", workers}});
  });
}

// The plugin's counters as its statistics file has them; every field may be missing, and
// fields that the hub does not know are left alone.
Result<BackboneReport> stats_of(const json& given) {
  if (!given.is_object()) return fix_input("'stats' must be an object of counters.");
  const JsonInput input(given);
  BackboneReport out;
  for (std::size_t i = 0; i < kCounterNames.size(); ++i) {
    KVASIR_ASSIGN(const auto count, input.optional_uint(kCounterNames[i]));
    out.counters[i] = count.value_or(0);
  }
  if (const json* layers = input.find("layers")) {
    if (!layers->is_array() || layers->size() > kHeatLayersMax)
      return fix_input("'stats.layers' must be a list of {\"layer\", \"rounds\", \"round_ns_sum\", \"p99_ns_below\"}.");
    for (const json& each : *layers) {
      if (!each.is_object()) return fix_input("each of 'stats.layers' must be an object.");
      const JsonInput layer(each);
      KVASIR_ASSIGN(const auto number, layer.optional_uint("layer", UINT32_MAX));
      KVASIR_ASSIGN(const auto rounds, layer.optional_uint("rounds"));
      KVASIR_ASSIGN(const auto sum_ns, layer.optional_number("round_ns_sum"));
      KVASIR_ASSIGN(const auto p99_ns, layer.optional_number("p99_ns_below"));
      if (!rounds || *rounds == 0) continue;
      out.layers.push_back({static_cast<std::uint32_t>(number.value_or(0)), *rounds,
                            sum_ns.value_or(0) / 1e3 / static_cast<double>(*rounds), p99_ns.value_or(0) / 1e3});
    }
  }
  if (const json* workers = input.find("workers")) {
    if (!workers->is_array() || workers->size() > kStatsWorkersMax)
      return fix_input("'stats.workers' must be a list of {\"name\", \"state\", \"answers\", \"answer_ns_sum\"}.");
    for (const json& each : *workers) {
      if (!each.is_object()) return fix_input("each of 'stats.workers' must be an object.");
      const JsonInput worker(each);
      KVASIR_ASSIGN(const auto id, worker.optional_text("name", 128));
      KVASIR_ASSIGN(const auto answers, worker.optional_uint("answers"));
      KVASIR_ASSIGN(const auto sum_ns, worker.optional_number("answer_ns_sum"));
      KVASIR_ASSIGN(const auto state, worker.optional_text("state", 32));
      if (!id) continue;
      BackboneReport::Worker& told = out.workers[*id];
      if (answers && *answers > 0 && sum_ns) told.latency_us = *sum_ns / 1e3 / static_cast<double>(*answers);
      if (state == "up") told.reached = true;
      if (state == "down") told.reached = false;
    }
  }
  return out;
}

Response heat(Hub& hub, const Request& request) {
  const auto input = JsonInput::parse(request.body);
  if (!input) return error_response(input.error());
  const auto model = input->text("model", kModelNameBytesMax);
  if (!model) return error_response(model.error());
  const auto saturation = input->optional_number("saturation");
  if (!saturation) return error_response(saturation.error());
  if (*saturation && **saturation > 1) return error_response(400, "'saturation' must be a share from 0 to 1.");
  std::vector<std::pair<std::uint32_t, std::vector<std::uint64_t>>> layers;
  if (const json* given = input->find("layers")) {
    constexpr std::string_view kShape = "'layers' must be a list of {\"layer\": L, \"uses\": [n, …]}.";
    if (!given->is_array() || given->size() > kHeatLayersMax) return error_response(400, kShape);
    for (const json& each : *given) {
      if (!each.is_object() || !each.contains("layer") || !each.contains("uses") || !each["uses"].is_array() ||
          each["uses"].size() > kHeatExpertsMax)
        return error_response(400, kShape);
      const auto layer = JsonInput::to_uint(each["layer"], "layer", UINT32_MAX);
      if (!layer) return error_response(layer.error());
      std::vector<std::uint64_t> uses;
      for (const json& n : each["uses"]) {
        const auto count = JsonInput::to_uint(n, "uses", std::uint64_t{1} << 40);
        if (!count) return error_response(count.error());
        uses.push_back(*count);
      }
      layers.emplace_back(static_cast<std::uint32_t>(*layer), std::move(uses));
    }
  }
  std::optional<BackboneReport> stats;
  if (const json* given = input->find("stats")) {
    auto read = stats_of(*given);
    if (!read) return error_response(read.error());
    const auto name = input->optional_text("backbone", kBackboneNameBytesMax);
    if (!name) return error_response(name.error());
    stats = *std::move(read);
    stats->reporter = std::format("{}:{}", request.principal.token_id, name->value_or(""));
  }
  const Response answer = hub.with_market([&](Market& market) {
    if (market.find_model(*model) == nullptr)
      return error_response(404, std::format("there is no model '{}' here; see /api/models.", *model));
    for (const auto& [layer, uses] : layers) market.report_heat(*model, layer, uses);
    if (*saturation) market.report_saturation(*model, **saturation);
    return json_response({{"ok", true}});
  });
  if (stats && answer.status == 200)
    hub.with_traffic(*model, [&](Traffic& traffic) { traffic.report(*std::move(stats), request.now); });
  return answer;
}

}  // namespace

void add_backbone_routes(Router& router, Hub& hub) {
  router.add(
      {.method = "GET",
       .pattern = "/api/expert-routes",
       .summary = "Which worker serves which experts, where; with since=, waits for a change",
       .scopes = {Scope::kBackbone},
       .query = {{"model", "of this model only", false}, {"since", "the version of the last answer", false}},
       .body_example = {},
       .answer_example =
           R"({"version":"5f0c-17","workers":[{"worker_id":"laptop","model":"qwen","url":"192.0.2.7:7000",
                "fingerprint":"00","ticket":"00",
                "segments":[[0,0,16]],"speed":1200.5,"draining":false}],"reason":"of an empty table, where there is one"})",
       .handler = [&hub](const Request& request) { return routes(hub, request); }});
  router.add({.method = "POST",
              .pattern = "/api/expert-heat",
              .summary = "A backbone's report: uses of each expert since the last one, and how busy the workers were",
              .scopes = {Scope::kBackbone},
              .query = {},
              .body_example = R"({"model":"qwen","saturation":0.25,"layers":[{"layer":0,"uses":[12,0,7]}],"backbone":"desk-4711",
                "stats":{"rounds":480,"pairs_remote":3800,"pairs_local":40,"bytes_sent":3000000,"bytes_received":3100000,
                "hedges":2,"late_answers":1,"invalid_answers":0,"workers_lost":0,"reconnects":0,"round_ns_sum":900000000,
                "layers":[{"layer":0,"rounds":10,"round_ns_sum":18000000,"p99_ns_below":4194304}],
                "workers":[{"name":"laptop","state":"up","answers":100,"answer_ns_sum":150000000}]}})",
              .answer_example = R"({"ok":true})",
              .handler = [&hub](const Request& request) { return heat(hub, request); }});
}

}  // namespace kvasir::hub
