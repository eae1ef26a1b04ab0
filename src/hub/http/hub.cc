#include "hub/http/hub.h"

#include <sys/stat.h>

#include <format>
#include <fstream>
#include <nlohmann/json.hpp>

#include "hub/auth/secrets.h"
#include "hub/http/json_input.h"

namespace kvasir::hub {
namespace {

constexpr auto kTidyInterval = std::chrono::seconds(2);
constexpr UnixSeconds kReportMemoryS = 3 * 24 * 3600;
// Several hubs behind one address share it: copy the file.
constexpr std::string_view kGrantKeyFile = "grant-key.pem";
constexpr std::size_t kOwnersKnownMax = 262'144;
// A note in the data folder, touched while nodes are there.
constexpr std::string_view kLifeFile = "nodes-seen";
constexpr UnixSeconds kLifeFreshS = 300;
constexpr Nanos kLifeInterval = std::chrono::seconds(10);

}  // namespace

Response waking_response(Nanos wait) {
  Response out = error_response(503, "the hub has just started and waits for the nodes it knew; ask again in a moment.");
  out.headers.emplace_back("Retry-After", std::to_string(std::chrono::ceil<std::chrono::seconds>(wait).count()));
  return out;
}

Hub::Hub(HubOptions options, std::unique_ptr<Store> store, std::function<void(const std::string&)> log)
    : options_(std::move(options)),
      instance_(random_hex(4)),
      store_(std::move(store)),
      log_(std::move(log)),
      request_log_(limited_log(log_)),
      authenticator_(*store_),
      market_(options_.market, random_u64) {}

Hub::~Hub() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Result<std::unique_ptr<Hub>> Hub::create(HubOptions options, std::unique_ptr<Store> store,
                                         std::function<void(const std::string&)> log) {
  std::unique_ptr<Hub> hub(new Hub(std::move(options), std::move(store), std::move(log)));
  KVASIR_TRY(hub->start());
  return hub;
}

Status Hub::start() {
  KVASIR_ASSIGN(grant_key_, net::SigningKey::load_or_make(options_.data_dir / kGrantKeyFile));
  catalogue_ = std::make_unique<Catalogue>(
      options_.models_dir, options_.data_dir / "hashes",
      Catalogue::Listener{.appeared =
                              [this](const HostedModelPtr& model) {
                                log_(std::format("model '{}': {} layers, {} experts.", model->name(),
                                                 model->moe().n_layer(), model->moe().n_expert()));
                                const Status put =
                                    with_market([&](Market& market) { return market.put_model(model->shape()); });
                                if (!put) log_(put.error().message);
                              },
                          .vanished =
                              [this](const std::string& name) {
                                log_(std::format("model '{}' is gone from the folder.", name));
                                with_market([&](Market& market) { market.remove_model(name); });
                              },
                          .log = log_});
  KVASIR_TRY(catalogue_->start());

  add_model_routes(router_, *this);
  add_market_routes(router_, *this);
  add_backbone_routes(router_, *this);
  add_auth_routes(router_, *this);
  add_ledger_routes(router_, *this);
  add_admin_routes(router_, *this);
  add_relay_routes(router_);
  add_grant_routes(router_, *this);
  add_view_routes(router_, *this);
  add_page_routes(router_);
  add_metrics_route(router_, *this);
  router_.add({.method = "GET",
               .pattern = "/api/health",
               .summary = "Whether the hub is there",
               .scopes = {},
               .query = {},
               .body_example = {},
               .answer_example = R"({"ok":true,"version":"0.1.0"})",
               .handler = [version = options_.version](const Request&) {
                 Response out;
                 out.text = dump({{"ok", true}, {"version", version}});
                 return out;
               }});
  // Made when it is asked for: its own route is in the table too.
  router_.add({.method = "GET",
               .pattern = "/api/openapi.json",
               .summary = "This description",
               .scopes = {},
               .query = {},
               .body_example = {},
               .answer_example = R"({"openapi":"3.1.0"})",
               .handler = [this](const Request&) {
                 Response out;
                 out.text = dump(router_.openapi(options_.version));
                 return out;
               }});

  view_ = std::make_unique<ViewFeed>(*this);
  read_bans();
  struct stat info{};
  if (::stat((options_.data_dir / kLifeFile).c_str(), &info) == 0 && unix_now() - info.st_mtim.tv_sec < kLifeFreshS)
    awake_at_ = monotonic_now() + options_.market.heartbeat + options_.market.heartbeat / 2;
  thread_ = std::thread([this] { tidy(); });
  return {};
}

void Hub::tidy() {
  TimePoint pruned = monotonic_now() - std::chrono::hours(1), noted{};
  MutexLock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    const TimePoint now = monotonic_now();
    const std::size_t nodes = with_market([&](Market& market) {
      market.advance(now);
      return market.node_count();
    });
    {
      // The last minutes are kept while nobody looks, too.
      const MutexLock traffic_lock(traffic_mutex_);
      for (auto& [model, traffic] : traffic_) traffic.advance(now);
    }
    read_bans();
    if (nodes > 0 && now - noted >= kLifeInterval) {
      noted = now;
      note_life();
    }
    if (now - pruned >= std::chrono::hours(1)) {
      pruned = now;
      if (const Status done = store_->prune(unix_now() - kReportMemoryS); !done) log_error(done.error());
    }
    lock.lock();
    wake_.wait_for(lock, kTidyInterval, [this]() KVASIR_REQUIRES(mutex_) { return stopping_; });
  }
}

void Hub::note_life() {
  std::ofstream note(options_.data_dir / kLifeFile, std::ios::trunc);
  note << unix_now() << '\n';
}

void Hub::read_bans() {
  const auto bans = store_->list_bans();
  if (!bans) {
    log_error(bans.error());
    return;
  }
  std::set<std::string, std::less<>> fresh;
  for (const BanRecord& ban : *bans) fresh.insert(ban.worker_id);
  {
    const MutexLock lock(mutex_);
    if (fresh == bans_) return;
    bans_ = fresh;
  }
  with_market([&](Market& market) {
    for (const std::string& id : fresh) market.remove_node(id, monotonic_now());
  });
}

bool Hub::is_banned(const std::string& worker_id) const {
  const MutexLock lock(mutex_);
  return bans_.contains(worker_id);
}

void Hub::set_server_stats(std::function<ServerStats()> read) {
  const MutexLock lock(mutex_);
  server_stats_ = std::move(read);
}

ServerStats Hub::server_stats() const {
  std::function<ServerStats()> read;
  {
    const MutexLock lock(mutex_);
    read = server_stats_;
  }
  return read ? read() : ServerStats{};
}

Result<bool> Hub::owns_worker(const std::string& worker_id, const std::string& token_id) {
  {
    const MutexLock lock(mutex_);
    if (const auto known = owners_.find(worker_id); known != owners_.end()) return known->second == token_id;
  }
  KVASIR_ASSIGN(const std::string owner, store_->claim_worker(worker_id, token_id, unix_now()));
  const MutexLock lock(mutex_);
  if (owners_.size() >= kOwnersKnownMax) owners_.clear();
  owners_[worker_id] = owner;
  return owner == token_id;
}

}  // namespace kvasir::hub
