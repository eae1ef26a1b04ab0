// What a backbone tells its hub of itself, for people to look at: counters since its start, and
// the times of layers and workers over the last half minute.
//
// One caller at a time.
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "dispatch/dispatcher.h"

namespace kvasir::plugin {

// Often enough for a page that people watch; a state that changes is told sooner.
inline constexpr Nanos kTrafficInterval = std::chrono::seconds(2);
inline constexpr Nanos kTrafficLook = std::chrono::milliseconds(500);
// Of a backbone that does nothing.
inline constexpr Nanos kTrafficIdleInterval = std::chrono::seconds(10);

// The counters as KVASIR_STATS_FILE has them.
nlohmann::ordered_json counters_json(const dispatch::Stats& stats);
// One layer's times; null without rounds.
nlohmann::ordered_json layer_times_json(const dispatch::LayerTimes& times);

class TrafficReport {
 public:
  // What to send now: nothing while the last report is fresh and says what there is to say.
  // `layers` are those of the hub's model.
  std::optional<nlohmann::ordered_json> look(const dispatch::Dispatcher& dispatcher,
                                             const std::set<wire::LayerId>& layers, TimePoint now);

 private:
  // Where the times of a recent past begin.
  struct Snapshot {
    std::vector<dispatch::LayerTimes> layers;
    std::map<std::string, std::pair<std::uint64_t, Nanos>> workers;  // answers, and their time
  };
  nlohmann::ordered_json workers_json(const std::vector<dispatch::WorkerView>& workers) const;
  nlohmann::ordered_json layers_json(const std::vector<dispatch::LayerTimes>& all,
                                     const std::set<wire::LayerId>& layers) const;

  Snapshot base_, next_base_;
  std::optional<TimePoint> turned_, sent_;
  std::uint64_t rounds_ = 0;
  bool moving_ = false;
  std::string states_;
};

}  // namespace kvasir::plugin
