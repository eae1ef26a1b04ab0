// The plugin's side of a hub: the table of workers from it, by long poll, and reports to it of
// which experts are used, how busy the workers are, what each has done, and how fast it all goes.
//
// Two threads of its own, which no round waits for. While the hub is away the dispatcher keeps
// the table it has, and reports wait.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "dispatch/dispatcher.h"
#include "hub/client/hub_client.h"
#include "plugin/session_grants.h"
#include "plugin/traffic_report.h"

namespace kvasir::plugin {

// How to reach a worker of the hub's table; the error says why not.
Result<dispatch::WorkerAddress> address_of(const nlohmann::json& worker);

class HubFollower {
 public:
  struct Options {
    hub::HubAddress hub;
    std::shared_ptr<SessionGrants> grants{};  // kept fresh for the table's workers; may be null
    Nanos report_interval = std::chrono::seconds(10);
    std::function<void(std::string)> log;
  };
  // `dispatcher` takes workers that follow, and outlives this.
  static Result<std::unique_ptr<HubFollower>> start(Options options, dispatch::Dispatcher& dispatcher);
  // Sends a last report, if the hub takes it within moments.
  ~HubFollower();

  // A layer of a model that is in use. Workers are asked for once the hub knows its model.
  void add_layer(const wire::LayerId& id);

 private:
  struct Report {
    std::string id;
    std::vector<dispatch::Served> served;
  };

  HubFollower(Options options, dispatch::Dispatcher& dispatcher) : options_(std::move(options)), dispatcher_(dispatcher) {}
  // Waits, or returns at once when there is a reason to look; false: stop.
  bool pause(Nanos time);
  bool stopping();

  void follow();
  Nanos find_models();  // how long to wait before the next look
  Nanos confirm_models();  // likewise: whether the hub still serves the files that are in use here
  Nanos ask_routes();
  void take_routes(const nlohmann::json& answer);
  void renew_grants();
  Nanos away(const Result<hub::HubReply>& reply);

  void report();
  void report_once();
  void report_heat();
  void report_traffic(TimePoint now);
  void report_service();

  const Options options_;
  dispatch::Dispatcher& dispatcher_;
  std::unique_ptr<hub::HubClient> follow_client_, report_client_;

  Mutex mutex_;
  Condition wake_;
  bool stopping_ KVASIR_GUARDED_BY(mutex_) = false;
  bool reported_ KVASIR_GUARDED_BY(mutex_) = false;
  bool look_ KVASIR_GUARDED_BY(mutex_) = false;
  // In use; the name of their model, once known.
  std::map<wire::LayerId, std::optional<std::string>> layers_ KVASIR_GUARDED_BY(mutex_);

  // Of the thread that follows.
  std::string version_, polled_;
  Nanos backoff_{};
  bool away_said_ = false, unknown_said_ = false;
  bool table_changed_ = false;
  TimePoint confirmed_{};
  std::vector<std::string> granted_;  // the table's workers whose certificate is known
  std::map<std::string, std::string> skipped_;  // workers that cannot be used, and why: said once

  // Of the thread that reports.
  std::optional<Report> unsent_;
  TrafficReport traffic_;
  TimePoint traffic_again_{};  // not before, after a report that failed
  std::uint64_t reports_ = 0, rounds_ = 0, rounds_busy_ = 0;
  std::string run_id_;

  std::thread follow_thread_, report_thread_;
};

}  // namespace kvasir::plugin
