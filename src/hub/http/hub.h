// The hub as an object: store, market, models and the routes of the API over them. What
// listens is a Server; this has no socket.
//
// Thread contract: handlers run on several threads; the market is behind one mutex, held for
// microseconds. A thread of the hub's own reads bans, advances the market and tidies up.
#pragma once

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>

#include "base/log_limit.h"
#include "base/mutex.h"
#include "hub/auth/tokens.h"
#include "hub/core/market.h"
#include "hub/core/nonces.h"
#include "hub/core/traffic.h"
#include "hub/http/router.h"
#include "hub/http/server.h"
#include "hub/http/view_feed.h"
#include "hub/models/catalogue.h"
#include "hub/relay/relay_host.h"
#include "hub/store/store.h"
#include "net/grant.h"

namespace kvasir::hub {

struct HubOptions {
  std::filesystem::path data_dir;
  std::filesystem::path models_dir;
  MarketOptions market;
  std::string version;
  // The dashboard shows coverage, workers and traffic (no addresses) without a token.
  bool public_view = false;
  std::uint64_t grant_life_s = net::kGrantLife_s;
  // How this hub is reached itself, where several share a store; empty: it is the only one.
  std::string public_url;
};

class Hub;

// What the relay asks: who owns which worker id, and where to put its figures.
class RelayHostOfHub final : public RelayHost {
 public:
  explicit RelayHostOfHub(Hub& hub) : hub_(hub) {}
  Result<bool> may_serve(const std::string& session, const std::string& token_id) override;
  bool is_banned(const std::string& session) override;
  void waits_here(const std::string& session) override;
  std::string waits_elsewhere(const std::string& session) override;
  Status record(const std::vector<RelayUse>& uses) override;

 private:
  Hub& hub_;
};

class Hub {
 public:
  static Result<std::unique_ptr<Hub>> create(HubOptions options, std::unique_ptr<Store> store,
                                             std::function<void(const std::string&)> log);
  ~Hub();

  const Router& router() const { return router_; }
  Authenticator& authenticator() { return authenticator_; }
  Store& store() { return *store_; }
  RelayHost& relay_host() { return relay_host_; }
  const net::SigningKey& grant_key() const { return *grant_key_; }

  // For the handlers, which live in api_*.cc by subject.
  const HubOptions& options() const { return options_; }
  Catalogue& catalogue() { return *catalogue_; }
  // Calls `work(Market&)` under the lock.
  template <typename Work>
  auto with_market(const Work& work) {
    const MutexLock lock(market_mutex_);
    return work(market_);
  }
  // Calls `work(Traffic&)` with what backbones say of that model; must not be called under the market's lock.
  template <typename Work>
  auto with_traffic(const std::string& model, const Work& work) {
    const MutexLock lock(traffic_mutex_);
    if (traffic_.size() >= kModelsMax && !traffic_.contains(model)) traffic_.clear();
    return work(traffic_[model]);
  }
  ViewFeed& view() { return *view_; }
  std::atomic<std::size_t> lines{0};  // open, of nodes
  // Whether this worker id belongs to that token, or belongs to nobody yet and does now.
  Result<bool> owns_worker(const std::string& worker_id, const std::string& token_id);
  // Of the server over these routes, once there is one.
  void set_server_stats(std::function<ServerStats()> read);
  ServerStats server_stats() const;
  bool is_banned(const std::string& worker_id) const;
  void read_bans();
  void log_error(const Error& error) const { request_log_(error.message); }
  Mutex nonces_mutex;
  Nonces nonces KVASIR_GUARDED_BY(nonces_mutex){std::chrono::seconds(60)};
  // Of this start of this process: counters that begin anew are not taken for old ones.
  const std::string& instance() const { return instance_; }
  // Just started, and nodes that were here a moment ago have not reported yet: volunteers
  // would be sent to holes that are none. Zero: awake.
  Nanos wakes_in(TimePoint now) const { return std::max(Nanos::zero(), awake_at_ - now); }

 private:
  Hub(HubOptions options, std::unique_ptr<Store> store, std::function<void(const std::string&)> log);
  Status start();
  void tidy();
  void note_life();

  HubOptions options_;
  const std::string instance_;
  std::unique_ptr<Store> store_;
  LogFunction log_;          // what the owner's files cause
  LogFunction request_log_;  // within its bound: what requests cause
  Authenticator authenticator_;
  RelayHostOfHub relay_host_{*this};
  std::optional<net::SigningKey> grant_key_;
  Router router_;
  Mutex market_mutex_;
  Market market_ KVASIR_GUARDED_BY(market_mutex_);
  Mutex traffic_mutex_;
  std::map<std::string, Traffic> traffic_ KVASIR_GUARDED_BY(traffic_mutex_);
  mutable Mutex mutex_;
  std::function<ServerStats()> server_stats_ KVASIR_GUARDED_BY(mutex_);
  std::set<std::string, std::less<>> bans_ KVASIR_GUARDED_BY(mutex_);
  // Worker id -> token id, as the store has them.
  std::unordered_map<std::string, std::string> owners_ KVASIR_GUARDED_BY(mutex_);
  Condition wake_;
  bool stopping_ KVASIR_GUARDED_BY(mutex_) = false;
  TimePoint awake_at_{};
  std::unique_ptr<Catalogue> catalogue_;  // calls back into the market: gone before it
  std::unique_ptr<ViewFeed> view_;  // looks at all of the above
  std::thread thread_;
};

// The answer while wakes_in() is not zero.
Response waking_response(Nanos wait);

// Each adds the routes of one subject.
void add_model_routes(Router& router, Hub& hub);
void add_market_routes(Router& router, Hub& hub);
void add_backbone_routes(Router& router, Hub& hub);
void add_auth_routes(Router& router, Hub& hub);
void add_ledger_routes(Router& router, Hub& hub);
void add_view_routes(Router& router, Hub& hub);
void add_page_routes(Router& router);
void add_metrics_route(Router& router, Hub& hub);
void add_admin_routes(Router& router, Hub& hub);
void add_relay_routes(Router& router);
void add_grant_routes(Router& router, Hub& hub);

}  // namespace kvasir::hub
