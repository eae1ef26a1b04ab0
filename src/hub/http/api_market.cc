// Coverage, demand and volunteers: what nodes say and ask.

#include <algorithm>
#include <format>

#include "base/hex.h"
#include "hub/http/hub.h"
#include "hub/http/json_input.h"
#include "hub/models/proof.h"

namespace kvasir::hub {
namespace {

using nlohmann::json;

constexpr std::size_t kWorkerIdBytesMax = 128;
constexpr std::size_t kUrlBytesMax = 256;
constexpr std::size_t kTicketBytesMax = 128;
constexpr std::size_t kDeviceBytesMax = 128;
constexpr std::size_t kFingerprintDigits = 64;
constexpr std::size_t kSelfDeclaredModelsMax = 64;
constexpr std::uint64_t kLayersMax = 4096, kExpertsMax = 65'536;

Response json_response(const json& value) {
  Response out;
  out.text = dump(value);
  return out;
}

double seconds(Nanos time) { return std::round(std::chrono::duration<double>(time).count() * 1000) / 1000; }

Result<Segment> segment_of(std::uint64_t layer, const json& begin, const json& end) {
  KVASIR_ASSIGN(const std::uint64_t a, JsonInput::to_uint(begin, "segments", kExpertsMax));
  KVASIR_ASSIGN(const std::uint64_t b, JsonInput::to_uint(end, "segments", kExpertsMax));
  if (a >= b)
    return fix_input(
        std::format("the segment [{}, {}) of layer {} is empty; write [layer, a, b] with a < b.", a, b, layer));
  return Segment{static_cast<std::uint32_t>(layer), static_cast<std::uint32_t>(a), static_cast<std::uint32_t>(b)};
}

// "segments": [[layer, a, b], …] and "sets": {"layer": [[a, b], …]}, together.
Result<Segments> holdings_of(const JsonInput& input) {
  std::vector<Segment> out;
  if (const json* segments = input.find("segments")) {
    if (!segments->is_array() || segments->size() > kSegmentsMax)
      return fix_input("'segments' must be a list of [layer, a, b].");
    for (const json& s : *segments) {
      if (!s.is_array() || s.size() != 3) return fix_input("'segments' must be a list of [layer, a, b].");
      KVASIR_ASSIGN(const std::uint64_t layer, JsonInput::to_uint(s[0], "segments", kLayersMax));
      KVASIR_ASSIGN(const Segment segment, segment_of(layer, s[1], s[2]));
      out.push_back(segment);
    }
  }
  if (const json* sets = input.find("sets")) {
    constexpr std::string_view kShape = "'sets' must be an object like {\"0\": [[0,16],[20,21]]}.";
    if (!sets->is_object()) return fix_input(std::string(kShape));
    for (const auto& [name, ranges] : sets->items()) {
      const auto layer = parse_ranges(name, kLayersMax, "layer");
      if (!layer || layer->size() != 1 || !ranges.is_array()) return fix_input(std::string(kShape));
      for (const json& range : ranges) {
        if (!range.is_array() || range.size() != 2 || out.size() >= kSegmentsMax) return fix_input(std::string(kShape));
        KVASIR_ASSIGN(const Segment segment, segment_of(layer->ranges().front().begin, range[0], range[1]));
        out.push_back(segment);
      }
    }
  }
  return normalize(std::move(out));
}

// "host:port", "relay:SESSION", or empty: one line without spaces.
Status check_url(const std::string& url) {
  if (std::ranges::any_of(url, [](unsigned char c) { return c <= 0x20 || c >= 0x7f; }))
    return fix_input("'url' must be host:port or relay:SESSION.");
  if (!url.empty() && url.find(':') == std::string::npos) return fix_input("'url' must be host:port or relay:SESSION.");
  return {};
}

Result<Coverage> coverage_of(const JsonInput& input, const Request& request) {
  Coverage out;
  KVASIR_ASSIGN(out.worker_id, input.text("worker_id", kWorkerIdBytesMax));
  if (out.worker_id.empty()) return fix_input("'worker_id' is empty; give the node a name that it keeps.");
  KVASIR_ASSIGN(out.model, input.text("model", kModelNameBytesMax));
  KVASIR_ASSIGN(const auto url, input.optional_text("url", kUrlBytesMax));
  out.url = url.value_or("");
  KVASIR_TRY(check_url(out.url));
  KVASIR_ASSIGN(const auto fingerprint, input.optional_text("fingerprint", kFingerprintDigits));
  out.fingerprint = fingerprint.value_or("");
  if (!out.fingerprint.empty() && (out.fingerprint.size() != kFingerprintDigits || !from_hex(out.fingerprint)))
    return fix_input("'fingerprint' must be 64 hexadecimal digits: the SHA-256 of the worker's certificate.");
  KVASIR_ASSIGN(const auto ticket, input.optional_text("ticket", kTicketBytesMax));
  out.ticket = ticket.value_or("");
  KVASIR_ASSIGN(out.holdings, holdings_of(input));
  KVASIR_ASSIGN(const auto speed, input.optional_number("speed"));
  out.speed_rows_per_s = speed.value_or(0);
  KVASIR_ASSIGN(const auto capacity, input.optional_uint("capacity"));
  out.capacity_bytes = capacity.value_or(0);
  KVASIR_ASSIGN(const auto device, input.optional_text("device", kDeviceBytesMax));
  out.device = device.value_or("");
  KVASIR_ASSIGN(out.draining, input.flag("draining"));
  KVASIR_ASSIGN(const auto reservation, input.optional_text("reservation", 64));
  out.reservation = reservation.value_or("");
  out.owner = request.principal.token_id;
  return out;
}

// Checks the answer to a challenge against the model's file.
Status settle(Hub& hub, const JsonInput& proof, const Coverage& beat) {
  KVASIR_ASSIGN(const std::string id, proof.text("id", 64));
  const auto challenge =
      hub.with_market([&](Market& market) { return market.open_challenge(beat.worker_id, beat.owner, id); });
  if (!challenge) return {};  // too late, or never asked: a new one follows
  const json* hashes = proof.find("hashes");
  if (hashes == nullptr || !hashes->is_array() || hashes->size() != challenge->spans.size())
    return fix_input(
        std::format("'proof.hashes' must be a list of {} hashes, one for each span.", challenge->spans.size()));
  const HostedModelPtr model = hub.catalogue().find(beat.model);
  if (model == nullptr) return {};
  bool passed = true;
  for (std::size_t i = 0; i < challenge->spans.size(); ++i) {
    const ProofSpan& span = challenge->spans[i];
    KVASIR_ASSIGN(const gguf::Hash expected,
                  hash_span(model->moe(), span.layer, span.expert, span.offset, span.length, challenge->id));
    const json& given = (*hashes)[i];
    passed &= given.is_string() && given.get_ref<const std::string&>() == to_hex(expected);
  }
  KVASIR_TRY(model->check_unchanged());
  hub.with_market([&](Market& market) { market.settle_proof(beat.worker_id, id, passed, monotonic_now()); });
  return {};
}

json to_json(const Challenge& challenge) {
  json spans = json::array();
  for (const ProofSpan& s : challenge.spans)
    spans.push_back({{"layer", s.layer}, {"expert", s.expert}, {"offset", s.offset}, {"length", s.length}});
  return {{"id", challenge.id}, {"spans", spans}};
}

// A closed group (no proofs) may cover a model that this hub has no file of: the heartbeat
// says how large it is.
Status learn_model(Hub& hub, const JsonInput& input, const std::string& name) {
  KVASIR_ASSIGN(const auto n_layer, input.optional_uint("n_layer", kLayersMax));
  KVASIR_ASSIGN(const auto n_expert, input.optional_uint("n_expert", kExpertsMax));
  KVASIR_ASSIGN(const auto n_embd, input.optional_uint("n_embd", 1u << 20));
  return hub.with_market([&](Market& market) -> Status {
    if (const ModelShape* known = market.find_model(name)) {
      if ((n_layer && *n_layer != known->n_expert.size()) || (n_expert && *n_expert != known->n_expert_max()))
        return fix_input(std::format("'{}' has {} layers of {} experts here; is this another model of the same name?",
                                     name, known->n_expert.size(), known->n_expert_max()));
      return {};
    }
    if (!n_layer || !n_expert || *n_layer == 0 || *n_expert == 0 || !model_name_of_file(name + ".gguf"))
      return fix_input(std::format("there is no model '{}' here; say its n_layer and n_expert.", name));
    if (market.models().size() >= kSelfDeclaredModelsMax) return retry_later("the hub knows as many models as it may.");
    ModelShape shape;
    shape.name = name;
    shape.n_embd = static_cast<std::uint32_t>(n_embd.value_or(0));
    shape.n_expert.assign(*n_layer, static_cast<std::uint32_t>(*n_expert));
    shape.bytes_per_expert.assign(*n_layer, kUnknownExpertBytes);
    shape.proof_bytes.assign(*n_layer, 0);
    return market.put_model(std::move(shape));
  });
}

Response coverage(Hub& hub, const Request& request) {
  const auto input = JsonInput::parse(request.body);
  if (!input) return error_response(input.error());
  auto beat = coverage_of(*input, request);
  if (!beat) return error_response(beat.error());
  if (hub.is_banned(beat->worker_id))
    return error_response(403, std::format("worker '{}' is banned from this hub.", beat->worker_id));
  const bool known = hub.with_market([&](Market& market) { return market.find_model(beat->model) != nullptr; });
  if (!known && hub.options().market.proof)
    return error_response(404, std::format("there is no model '{}' here; see /api/models.", beat->model));
  if (const Status learned = learn_model(hub, *input, beat->model); !learned) return error_response(learned.error());
  const auto owned = hub.owns_worker(beat->worker_id, request.principal.token_id);
  if (!owned) return error_response(owned.error());
  if (!*owned)
    return error_response(403,
                          std::format("worker id '{}' belongs to another token; choose another id.", beat->worker_id));
  if (const json* proof = input->find("proof")) {
    if (!proof->is_object()) return error_response(400, "'proof' must be an object with 'id' and 'hashes'.");
    if (const Status settled = settle(hub, JsonInput(*proof), *beat); !settled) return error_response(settled.error());
  }
  const auto reply =
      hub.with_market([&](Market& market) { return market.coverage(*std::move(beat), monotonic_now()); });
  if (!reply) return error_response(reply.error());
  const MarketOptions& market = hub.options().market;
  json out = {{"ok", true},
              {"experts_counted", reply->experts_counted},
              {"ttl_s", seconds(market.ttl)},
              {"heartbeat_s", seconds(market.heartbeat)},
              {"move", reply->move}};
  if (reply->challenge) out["challenge"] = to_json(*reply->challenge);
  return json_response(out);
}

// The model of that name; without a name, the one that is scarcest.
Response demand(Hub& hub, const Request& request) {
  const auto named = request.query.find("model");
  return hub.with_market([&](Market& market) {
    std::string name = named == request.query.end() ? "" : named->second;
    std::vector<Run> runs;
    if (!name.empty()) {
      if (market.find_model(name) == nullptr)
        return error_response(404, std::format("there is no model '{}' here; see /api/models.", name));
      runs = market.demand(name, request.now);
    } else {
      double peak = -1;
      for (const ModelShape* model : market.models()) {
        std::vector<Run> of_model = market.demand(model->name, request.now);
        double worst = 0;
        for (const Run& run : of_model) worst = std::max(worst, run.scarcity());
        if (worst <= peak) continue;
        peak = worst;
        name = model->name;
        runs = std::move(of_model);
      }
    }
    json segments = json::array();
    for (const Run& run : runs)
      segments.push_back({{"layer", run.layer},
                          {"experts", {run.begin, run.end}},
                          {"replicas", run.replicas()},
                          {"reserved", run.reserved},
                          {"target", run.target},
                          {"scarcity", run.scarcity()}});
    return json_response({{"model", name}, {"segments", segments}});
  });
}

json range_of(const Run& run) {
  return {{"layer", run.layer},
          {"experts", {run.begin, run.end}},
          {"scarcity", run.scarcity()},
          {"replicas", run.replicas()},
          {"target", run.target}};
}

Response nothing_to_do(Hub& hub, std::string_view reason) {
  return json_response(
      {{"assigned", false}, {"reason", reason}, {"retry_after_s", seconds(hub.options().market.heartbeat)}});
}

Response volunteer(Hub& hub, const Request& request) {
  const auto input = JsonInput::parse(request.body);
  if (!input) return error_response(input.error());
  Offer offer;
  const auto model = input->optional_text("model", kModelNameBytesMax);
  const auto experts = input->optional_uint("max_experts");
  const auto bytes = input->optional_uint("memory_bytes");
  const auto worker_id = input->optional_text("worker_id", kWorkerIdBytesMax);
  for (const Error* wrong : {model ? nullptr : &model.error(), experts ? nullptr : &experts.error(),
                             bytes ? nullptr : &bytes.error(), worker_id ? nullptr : &worker_id.error()})
    if (wrong != nullptr) return error_response(*wrong);
  offer.model = model->value_or("");
  offer.experts_max = *experts;
  offer.bytes_max = *bytes;
  offer.worker_id = worker_id->value_or("");
  offer.owner = request.principal.token_id;
  if (!offer.experts_max && !offer.bytes_max)
    return error_response(400, "say what you offer: max_experts or memory_bytes.");
  if (hub.is_banned(offer.worker_id))
    return error_response(403, std::format("worker '{}' is banned from this hub.", offer.worker_id));
  if (const Nanos wait = hub.wakes_in(request.now); wait > Nanos::zero()) return waking_response(wait);
  return hub.with_market([&](Market& market) {
    if (!offer.model.empty() && market.find_model(offer.model) == nullptr)
      return error_response(404, std::format("there is no model '{}' here; see /api/models.", offer.model));
    const auto answer = market.volunteer(offer, request.now);
    if (!answer && answer.error().action == ErrorAction::kFixInput) return nothing_to_do(hub, answer.error().message);
    if (!answer) return error_response(answer.error());
    if (!*answer) return nothing_to_do(hub, "nothing is scarce; every expert has as many replicas as it should.");
    const Assignment& got = **answer;
    json out = range_of(got.runs.front());
    out["assigned"] = true;
    out["model"] = got.model->name;
    out["n_embd"] = got.model->n_embd;
    out["n_layer"] = got.model->n_expert.size();
    out["n_expert"] = got.model->n_expert_max();
    out["reservation"] = got.reservation;
    out["expires_in_s"] = seconds(got.expires_in);
    out["also"] = json::array();
    for (const Run& run : std::span(got.runs).subspan(1)) out["also"].push_back(range_of(run));
    return json_response(out);
  });
}

}  // namespace

void add_market_routes(Router& router, Hub& hub) {
  router.add(
      {.method = "POST",
       .pattern = "/api/expert-coverage",
       .summary = "A node's heartbeat: what it holds and where it is; every 10 s",
       .scopes = {Scope::kWorker},
       .query = {},
       .body_example =
           R"({"worker_id":"laptop","model":"qwen","n_layer":48,"n_expert":256,"segments":[[0,0,16]],
                "sets":{"1":[[0,4],[8,12]]},
                "url":"192.0.2.7:7000","fingerprint":"00","ticket":"00","capacity":340000000,"speed":1200.5,
                "device":"CPU","draining":false,"reservation":"",
                "proof":{"id":"00","hashes":["00"]}})",
       .answer_example = R"({"ok":true,"experts_counted":16,"ttl_s":30.0,"heartbeat_s":10.0,"move":false,
                "challenge":{"id":"00","spans":[{"layer":0,"expert":3,"offset":0,"length":65536}]}})",
       .handler = [&hub](const Request& request) { return coverage(hub, request); }});
  router.add(
      {.method = "GET",
       .pattern = "/api/expert-demand",
       .summary = "Replicas, targets and scarcity of every expert, in ranges",
       .scopes = {Scope::kWorker, Scope::kBackbone, Scope::kViewer},
       .query = {{"model", "of this model; without it, of the scarcest", false}},
       .body_example = {},
       .answer_example =
           R"({"model":"qwen","segments":[{"layer":0,"experts":[128,256],"replicas":1,"reserved":0,"target":2,
                "scarcity":0.5}]})",
       .handler = [&hub](const Request& request) { return demand(hub, request); }});
  router.add(
      {.method = "POST",
       .pattern = "/api/expert-volunteer",
       .summary = "What a node with so much room should hold; reserved for it for a while",
       .scopes = {Scope::kWorker},
       .query = {},
       .body_example = R"({"model":"","max_experts":64,"memory_bytes":340000000,"worker_id":"laptop"})",
       .answer_example =
           R"({"assigned":true,"model":"qwen","layer":0,"experts":[128,192],"scarcity":0.5,"replicas":1,"target":2,
                "n_embd":3072,
                "n_layer":48,"n_expert":256,"reservation":"00","expires_in_s":60.0,
                "also":[{"layer":1,"experts":[0,16],"scarcity":0.5,"replicas":1,"target":2}],
                "reason":"of assigned: false","retry_after_s":10.0})",
       .handler = [&hub](const Request& request) { return volunteer(hub, request); }});
}

}  // namespace kvasir::hub
