#include "plugin/hub_follower.h"

#include <signal.h>

#include <algorithm>
#include <format>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string_view>
#include <utility>

#include "base/hex.h"
#include "net/connect.h"
#include "net/tls_identity.h"

namespace kvasir::plugin {
namespace {

using nlohmann::json;

constexpr Nanos kPollPause = std::chrono::milliseconds(250);  // between two answers, however fast the table changes
constexpr Nanos kBackoffMin = std::chrono::seconds(1), kBackoffMax = std::chrono::seconds(30);
constexpr Nanos kConfirmPause = std::chrono::seconds(2);  // between two looks whether the files are still the same
constexpr Nanos kLookAgain = std::chrono::seconds(30);  // for a model that the hub does not have
constexpr Nanos kGoodbyeMax = std::chrono::seconds(3);
constexpr std::size_t kEntriesMax = 5000;  // of one report; the hub takes 10 000 in 1 MiB
constexpr std::size_t kSkippedSaidMax = 100;

std::string text_of(const json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

const json& list_of(const json& object, const char* name) {
  static const json kNone = json::array();
  const auto found = object.find(name);
  return found != object.end() && found->is_array() ? *found : kNone;
}

std::string random_hex() {
  std::random_device random;
  return std::format("{:08x}{:08x}", random(), random());
}

bool is_loopback(const std::string& host) { return host.starts_with("127.") || host == "::1" || host == "localhost"; }

}  // namespace

Result<dispatch::WorkerAddress> address_of(const json& worker) {
  if (!worker.is_object()) return retry_later("its entry in the hub's table is malformed.");
  KVASIR_ASSIGN(dispatch::WorkerAddress out, dispatch::parse_worker(text_of(worker, "url")));
  out.id = text_of(worker, "worker_id");
  out.token = text_of(worker, "ticket");
  if (const std::string fingerprint = text_of(worker, "fingerprint"); !fingerprint.empty()) {
    KVASIR_ASSIGN(const net::Fingerprint parsed, net::parse_fingerprint(fingerprint));
    out.fingerprint = net::format_fingerprint(parsed);
  } else if (!is_loopback(out.host)) {
    // Of a worker that a person named the person knows the network; of a stranger nobody does.
    return fix_input("it offers no certificate, and activations do not cross a network in the clear.");
  }
  return out;
}

Result<std::unique_ptr<HubFollower>> HubFollower::start(Options options, dispatch::Dispatcher& dispatcher) {
  std::unique_ptr<HubFollower> out(new HubFollower(std::move(options), dispatcher));
  out->run_id_ = random_hex();
  KVASIR_ASSIGN(out->follow_client_, hub::HubClient::create(out->options_.hub));
  KVASIR_ASSIGN(out->report_client_, hub::HubClient::create(out->options_.hub));
  // Signals are the host program's: its handlers must not run on these threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  out->follow_thread_ = std::thread([self = out.get()] { self->follow(); });
  out->report_thread_ = std::thread([self = out.get()] { self->report(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return out;
}

HubFollower::~HubFollower() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    wake_.notify_all();
    follow_client_->cancel();
    wake_.wait_for(lock, kGoodbyeMax, [this]() KVASIR_REQUIRES(mutex_) { return reported_; });
  }
  report_client_->cancel();
  follow_thread_.join();
  report_thread_.join();
}

void HubFollower::add_layer(const wire::LayerId& id) {
  const MutexLock lock(mutex_);
  if (!layers_.try_emplace(id).second) return;
  look_ = true;
  wake_.notify_all();
}

bool HubFollower::pause(Nanos time) {
  MutexLock lock(mutex_);
  wake_.wait_for(lock, time, [this]() KVASIR_REQUIRES(mutex_) { return stopping_ || look_; });
  return !stopping_;
}

bool HubFollower::stopping() {
  const MutexLock lock(mutex_);
  return stopping_;
}

// --- the table ---------------------------------------------------------------------------

void HubFollower::follow() {
  {
    MutexLock lock(mutex_);
    wake_.wait(lock, [this]() KVASIR_REQUIRES(mutex_) { return stopping_ || look_; });
  }
  while (!stopping()) {
    Nanos wait = find_models();
    if (wait == Nanos::zero()) wait = confirm_models();
    if (wait == Nanos::zero()) wait = ask_routes();
    if (!pause(wait)) return;
  }
}

// The hub cannot be asked, or will not answer just now: the table stays as it is.
Nanos HubFollower::away(const Result<hub::HubReply>& reply) {
  if (stopping()) return Nanos::zero();
  if (!std::exchange(away_said_, true))
    options_.log(std::format("{} The workers known so far are used meanwhile.", reply ? reply->error() : reply.error().message));
  backoff_ = std::clamp(2 * backoff_, kBackoffMin, kBackoffMax);
  const Nanos asked_for = reply ? reply->retry_after.value_or(Nanos::zero()) : Nanos::zero();
  return std::clamp(std::max(backoff_, asked_for), kBackoffMin, 2 * kBackoffMax);
}

// Asks for the models of layers that are new.
Nanos HubFollower::find_models() {
  std::vector<wire::LayerId> unknown;
  {
    const MutexLock lock(mutex_);
    look_ = false;
    for (const auto& [id, model] : layers_)
      if (!model) unknown.push_back(id);
  }
  bool missing = false;
  for (const wire::LayerId& id : unknown) {
    {
      const MutexLock lock(mutex_);
      if (layers_[id]) continue;  // named beside another one
    }
    const auto reply = follow_client_->get("/api/layers?id=" + to_hex(id));
    if (reply && reply->status == 404) {
      missing = true;
      break;  // of a model with one strange layer the others are strange, too
    }
    if (!reply || reply->status != 200) return away(reply);
    const json answer = reply->json();
    const std::string name = text_of(answer, "model");
    const MutexLock lock(mutex_);
    layers_[id] = name;
    for (const json& layer : list_of(answer, "layers")) {
      const auto other = from_hex(layer.is_object() ? text_of(layer, "layer_id") : "");
      wire::LayerId key{};
      if (!other || other->size() != key.size()) continue;
      std::ranges::copy(*other, key.begin());
      // Layers that are used later are then known at once.
      layers_[key] = name;
    }
  }
  if (!missing) return Nanos::zero();
  if (!std::exchange(unknown_said_, true))
    options_.log("the hub has no model with these experts (or another version of it), so none of its workers can be used; "
                 "run the file that the hub serves.");
  bool none = true;
  {
    const MutexLock lock(mutex_);
    for (const auto& [id, model] : layers_) none &= !model.has_value();
  }
  if (!none) return Nanos::zero();
  dispatcher_.set_workers({});
  return kLookAgain;
}

// A file may be replaced under its name: its workers then compute another model.
Nanos HubFollower::confirm_models() {
  if (!table_changed_ || monotonic_now() - confirmed_ < kConfirmPause) return Nanos::zero();
  std::map<std::string, wire::LayerId> models;
  {
    const MutexLock lock(mutex_);
    for (const auto& [id, model] : layers_)
      if (model) models.emplace(*model, id);
  }
  bool replaced = false;
  for (const auto& [name, id] : models) {
    const auto reply = follow_client_->get("/api/layers?id=" + to_hex(id));
    if (reply && reply->status == 404) {
      options_.log(std::format("the hub has replaced '{}' by another version, and its workers are used no more; restart with the "
                               "new file.",
                               name));
      unknown_said_ = true;
      const MutexLock lock(mutex_);
      for (auto& [layer, model] : layers_)
        if (model == name) model.reset();
      replaced = true;
    } else if (!reply || reply->status != 200) {
      return away(reply);
    }
  }
  table_changed_ = false;
  confirmed_ = monotonic_now();
  return replaced ? find_models() : Nanos::zero();
}

Nanos HubFollower::ask_routes() {
  std::set<std::string> models;
  {
    const MutexLock lock(mutex_);
    for (const auto& [id, model] : layers_)
      if (model) models.insert(*model);
  }
  // A model and its draft are two: then everything is asked for, and what is not theirs left out.
  const std::string filter = models.size() == 1 ? *models.begin() : std::string();
  if (filter != polled_) version_.clear();
  polled_ = filter;
  std::string path = "/api/expert-routes?model=" + filter;
  if (!version_.empty()) path += "&since=" + version_;
  const auto reply = follow_client_->get(path);
  if (reply && reply->status == 404) {
    // The model is gone from the hub, and with it whoever served it.
    const MutexLock lock(mutex_);
    for (auto& [id, model] : layers_) model.reset();
    version_.clear();
    return kBackoffMin;
  }
  if (!reply || reply->status != 200) return away(reply);
  if (std::exchange(away_said_, false)) options_.log("the hub is back.");
  backoff_ = Nanos::zero();
  const json answer = reply->json();
  const std::string version = text_of(answer, "version");
  table_changed_ |= version != version_;
  if (version_.empty() || version != version_) take_routes(answer);
  else renew_grants();
  version_ = version;
  return kPollPause;
}

void HubFollower::take_routes(const json& answer) {
  std::set<std::string> models;
  {
    const MutexLock lock(mutex_);
    for (const auto& [id, model] : layers_)
      if (model) models.insert(*model);
  }
  std::vector<dispatch::WorkerAddress> workers;
  granted_.clear();
  for (const json& worker : list_of(answer, "workers")) {
    if (!worker.is_object() || !models.contains(text_of(worker, "model"))) continue;
    // Left out it finishes what it has, and is asked nothing new.
    if (worker.value("draining", json(false)) == json(true)) continue;
    auto address = address_of(worker);
    if (address) {
      if (!address->fingerprint.empty()) granted_.push_back(address->id);
      workers.push_back(*std::move(address));
      continue;
    }
    std::string& why = skipped_[text_of(worker, "worker_id")];
    if (why != address.error().message && skipped_.size() <= kSkippedSaidMax)
      options_.log(std::format("worker '{}' cannot be used: {}", text_of(worker, "worker_id"), address.error().message));
    why = address.error().message;
    if (skipped_.size() > kSkippedSaidMax) skipped_.erase(text_of(worker, "worker_id"));
  }
  if (const std::string reason = text_of(answer, "reason"); workers.empty() && !reason.empty()) options_.log(reason);
  renew_grants();  // first: the connections that follow show them
  dispatcher_.set_workers(std::move(workers));
}

void HubFollower::renew_grants() {
  if (!options_.grants) return;
  const Status renewed = options_.grants->renew(*follow_client_, granted_, monotonic_now());
  if (!renewed && !stopping()) options_.log(renewed.error().message);
}

// --- reports -----------------------------------------------------------------------------

void HubFollower::report() {
  TimePoint next = monotonic_now() + options_.report_interval;
  MutexLock lock(mutex_);
  const auto done = [this]() KVASIR_REQUIRES(mutex_) { return stopping_; };
  while (!wake_.wait_for(lock, std::min(options_.report_interval, kTrafficLook), done)) {
    lock.unlock();
    const TimePoint now = monotonic_now();
    if (now >= next) {
      report_once();
      next = now + options_.report_interval;
    }
    if (now >= traffic_again_) report_traffic(now);
    lock.lock();
  }
  lock.unlock();
  report_once();
  lock.lock();
  reported_ = true;
  wake_.notify_all();
}

void HubFollower::report_once() {
  report_heat();
  // A report that waited for the hub goes first, then what came since: this may be the last time.
  const bool had_waited = unsent_.has_value();
  report_service();
  if (had_waited && !unsent_) report_service();
}

void HubFollower::report_heat() {
  const dispatch::Stats stats = dispatcher_.stats();
  const std::uint64_t rounds = stats.rounds - rounds_, busy = stats.rounds_busy - rounds_busy_;
  if (rounds == 0) return;
  std::map<std::string, json> layers;  // by model
  {
    std::vector<dispatch::LayerUses> all = dispatcher_.take_uses();
    const MutexLock lock(mutex_);
    for (const dispatch::LayerUses& uses : all) {
      // The hub counts the leading group; a second one is used as the router picked the first.
      const auto found = layers_.find(uses.layer_id);
      if (uses.group != wire::ExpertGroup::kExps || found == layers_.end() || !found->second) continue;
      layers.try_emplace(*found->second, json::array())
          .first->second.push_back({{"layer", uses.layer}, {"uses", uses.uses}});
    }
  }
  const double saturation = static_cast<double>(busy) / static_cast<double>(rounds);
  for (const auto& [model, list] : layers) {
    const auto reply = report_client_->post("/api/expert-heat", {{"model", model}, {"saturation", saturation}, {"layers", list}});
    if (!reply || reply->status != 200) return;  // heat is of the moment: what is not taken now is not worth keeping
  }
  rounds_ = stats.rounds;
  rounds_busy_ = stats.rounds_busy;
}

// The counters are of the whole process: a model and its draft make one report, under the name
// of the one with more layers.
void HubFollower::report_traffic(TimePoint now) {
  std::map<std::string, std::set<wire::LayerId>> models;
  {
    const MutexLock lock(mutex_);
    for (const auto& [id, model] : layers_)
      if (model) models[*model].insert(id);
  }
  const auto most = std::ranges::max_element(models, {}, [](const auto& entry) { return entry.second.size(); });
  if (most == models.end()) return;
  const auto stats = traffic_.look(dispatcher_, most->second, now);
  if (!stats) return;
  const nlohmann::json report = {{"model", most->first}, {"backbone", run_id_}, {"stats", *stats}};
  const auto reply = report_client_->post("/api/expert-heat", report);
  // What is lost is made up for by the next one, whose counters go on.
  if (!reply || reply->status != 200) traffic_again_ = monotonic_now() + options_.report_interval;
}

// Under one name until the hub has it, so that nothing counts twice.
void HubFollower::report_service() {
  if (!unsent_) {
    std::vector<dispatch::Served> served = dispatcher_.take_served();
    if (served.empty()) return;
    if (served.size() > kEntriesMax) served.resize(kEntriesMax);
    unsent_ = Report{std::format("{}-{}", run_id_, reports_++), std::move(served)};
  }
  json entries = json::array();
  for (const dispatch::Served& each : unsent_->served)
    entries.push_back({{"worker_id", each.id}, {"pairs", each.pairs}, {"rows", each.rows}, {"bytes", each.bytes}});
  const auto reply = report_client_->post("/api/contributions", {{"report_id", unsent_->id}, {"entries", entries}});
  if (!reply || reply->status == 429 || reply->status >= 500) return;
  if (reply->status != 200) options_.log("the hub does not take the report of what its workers did: " + reply->error());
  unsent_.reset();
}

}  // namespace kvasir::plugin
