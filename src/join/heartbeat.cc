#include "join/heartbeat.h"

#include <format>
#include <random>

#include "base/hex.h"
#include "hub/models/proof.h"
#include "net/connect.h"

namespace kvasir::join {
namespace {

constexpr Nanos kInterval = std::chrono::seconds(10);
constexpr Nanos kIntervalMin = std::chrono::seconds(1), kIntervalMax = std::chrono::minutes(1);
constexpr int kProofsPerBeatMax = 3;

Result<nlohmann::json> answer(const nlohmann::json& challenge, const NodeState& state) {
  if (!challenge.contains("id") || !challenge["id"].is_string() || !challenge.contains("spans") ||
      !challenge["spans"].is_array())
    return retry_later("the hub's challenge is malformed.");
  const auto& id = challenge["id"].get_ref<const std::string&>();
  nlohmann::json hashes = nlohmann::json::array();
  for (const auto& span : challenge["spans"]) {
    for (const char* name : {"layer", "expert", "offset", "length"})
      if (!span.is_object() || !span.contains(name) || !span[name].is_number_unsigned())
        return retry_later("the hub's challenge is malformed.");
    Result<gguf::Hash> hash = retry_later("the hub asks for what this node does not hold.");
    for (const auto& slice : state.slices) {
      hash = hub::hash_span(*slice, span["layer"], span["expert"], span["offset"], span["length"], id);
      if (hash) break;
    }
    KVASIR_TRY(hash);
    hashes.push_back(to_hex(*hash));
  }
  return nlohmann::json{{"id", id}, {"hashes", hashes}};
}

}  // namespace

Result<std::unique_ptr<Heartbeat>> Heartbeat::start(Options options) {
  KVASIR_ASSIGN(auto client, hub::HubClient::create(options.hub));
  std::unique_ptr<Heartbeat> heartbeat(new Heartbeat(std::move(options), std::move(client)));
  heartbeat->run_id_ = std::format("{:08x}{:08x}", std::random_device{}(), std::random_device{}());
  heartbeat->thread_ = std::thread([raw = heartbeat.get()] { raw->run(); });
  return heartbeat;
}

Heartbeat::~Heartbeat() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Heartbeat::update(const std::function<void(NodeState&)>& change) {
  {
    const MutexLock lock(mutex_);
    change(state_);
    changed_ = true;
  }
  wake_.notify_all();
}

NodeState Heartbeat::state() const {
  const MutexLock lock(mutex_);
  return state_;
}

void Heartbeat::say_alive() {
  update([](NodeState&) {});
}

bool Heartbeat::known() const {
  const MutexLock lock(mutex_);
  return known_;
}

bool Heartbeat::take_move_request() {
  const MutexLock lock(mutex_);
  return std::exchange(move_, false);
}

std::uint64_t Heartbeat::experts_counted() const {
  const MutexLock lock(mutex_);
  return counted_;
}

void Heartbeat::run() {
  std::mt19937 random(std::random_device{}());
  Nanos due = Nanos::zero();
  MutexLock lock(mutex_);
  while (!stopping_) {
    wake_.wait_for(lock, due, [this]() KVASIR_REQUIRES(mutex_) { return stopping_ || changed_; });
    if (stopping_) break;
    changed_ = false;
    lock.unlock();
    // Nodes that lost the hub at one moment do not all come back at one moment.
    due = beat();
    if (reachable_) report_service();
    due += due * static_cast<int>(random() % 100) / 1000;
    lock.lock();
  }
  lock.unlock();
  if (!reachable_) return;
  // What came since the last report: this is the last one. One that waited goes first.
  const bool had_waited = unsent_.has_value();
  report_service();
  if (had_waited && !unsent_) report_service();
}

void Heartbeat::report_service() {
  if (!options_.served || state().model.empty()) return;
  if (!unsent_) {
    auto served = options_.served->take();
    if (served.empty()) return;
    unsent_ = Report{std::format("{}-{}", run_id_, n_reports_++), std::move(served)};
  }
  nlohmann::json entries = nlohmann::json::array();
  for (const auto& [backbone, service] : unsent_->served) {
    nlohmann::json entry = {
        {"worker_id", options_.worker_id}, {"pairs", service.pairs}, {"rows", service.rows}, {"bytes", service.bytes}};
    if (!backbone.empty()) entry["backbone"] = backbone;
    entries.push_back(std::move(entry));
  }
  const auto reply = client_->post("/api/contributions", {{"report_id", unsent_->id}, {"entries", entries}});
  if (!reply || reply->status == 429 || reply->status >= 500) return;  // again after the next beat
  if (reply->status != 200) options_.warn("the hub does not take the report of what this node served: " + reply->error());
  unsent_.reset();
}

nlohmann::json Heartbeat::body_of(const NodeState& state) const {
  nlohmann::json segments = nlohmann::json::array();
  for (const hub::Segment& s : state.holdings) segments.push_back({s.layer, s.begin, s.end});
  std::string url;
  const std::string host = options_.advertise.empty() ? local_ip_ : options_.advertise;
  if (state.port != 0 && state.direct && !host.empty()) url = net::format_host_port({host, state.port});
  if (state.port != 0 && state.relayed) url += (url.empty() ? "relay:" : "+relay:") + options_.worker_id;
  nlohmann::json body = {{"worker_id", options_.worker_id},
                         {"model", state.model},
                         {"segments", segments},
                         {"url", url},
                         {"fingerprint", state.fingerprint},
                         {"ticket", state.ticket},
                         {"capacity", state.capacity_bytes},
                         {"speed", state.speed_rows_per_s},
                         {"device", options_.device},
                         {"draining", state.draining}};
  if (!state.reservation.empty()) body["reservation"] = state.reservation;
  return body;
}

Nanos Heartbeat::beat() {
  const NodeState now = state();
  if (now.model.empty()) return kIntervalMax;  // an update wakes it earlier
  nlohmann::json body = body_of(now);
  for (int i = 0; i <= kProofsPerBeatMax; ++i) {
    const auto reply = client_->post("/api/expert-coverage", body);
    if (!reply || (reply->status != 200 && reply->status >= 500)) {
      if (std::exchange(reachable_, false))
        options_.warn(std::format("{} The node goes on serving and keeps trying.",
                                 reply ? reply->error() : reply.error().message));
      return reply && reply->retry_after ? std::clamp(*reply->retry_after, kIntervalMin, kIntervalMax)
                                         : std::max(interval_ / 2, kIntervalMin);
    }
    if (!std::exchange(reachable_, true)) options_.log("the hub is back.");
    if (reply->status == 429) return std::clamp(reply->retry_after.value_or(kInterval), kIntervalMin, kIntervalMax);
    if (reply->status != 200) {
      options_.warn(std::format("the hub refuses this node's heartbeat: {}", reply->error()));
      const MutexLock lock(mutex_);
      if (reply->status == 404) move_ = true;  // the model is gone
      return kIntervalMax;
    }
    const nlohmann::json answer_json = reply->json();
    bool moved_house = false;
    const auto counted = answer_json.value("experts_counted", std::uint64_t{0});
    {
      const MutexLock lock(mutex_);
      known_ = true;
      if (reply->local_ip != local_ip_) {
        local_ip_ = reply->local_ip;
        moved_house = options_.advertise.empty() && now.port != 0;
      }
      counted_ = counted;
      if (answer_json.value("move", false)) move_ = true;
    }
    const auto challenge = answer_json.find("challenge");
    if (challenge != answer_json.end() && body.contains("proof") && counted == 0) {
      // The model's file was replaced, or ours is damaged: these slices are of no more use. Proofs
      // that fail again and again would bar the node.
      if (std::exchange(refused_, now.slices) != now.slices)
        options_.log("the hub does not accept what this node holds (its model may have changed); asking for work anew.");
    }
    if (challenge != answer_json.end() && !refused_.empty() && refused_ == now.slices) {
      const MutexLock lock(mutex_);
      move_ = true;
      return interval_;
    }
    if (challenge == answer_json.end() && !moved_house) {
      const double seconds = answer_json.value("heartbeat_s", 10.0);
      interval_ = std::clamp(std::chrono::duration_cast<Nanos>(std::chrono::duration<double>(seconds)), kIntervalMin,
                             kIntervalMax);
      return interval_;
    }
    body = body_of(now);
    if (challenge != answer_json.end()) {
      auto proof = answer(*challenge, now);
      if (!proof) {
        options_.warn(std::format("a proof cannot be given: {}", proof.error().message));
        return kInterval;
      }
      body["proof"] = *std::move(proof);
    }
  }
  return kInterval;
}

}  // namespace kvasir::join
