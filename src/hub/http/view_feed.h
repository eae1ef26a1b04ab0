// What the dashboard and `kvasir top` show, as server-sent events: the state of one model at
// first, then what has changed. A follower that is slow, or was away, gets the changes it
// missed as one; nothing queues up for it.
//
// Events, each with one JSON object (docs/dashboard.md):
//   hello     the models here, the one that is shown and its shape
//   coverage  layers that changed, whole: runs of experts in the same state
//   workers   all nodes of the model
//   traffic   what goes on now
//   samples   points of the last ten minutes that are new
//   latency   times of each layer's rounds
//
// Thread contract: a thread of its own looks at the market four times a second while anybody
// follows; the members may be called from any thread.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "hub/http/event_stream.h"

namespace kvasir::hub {

class Hub;

inline constexpr Nanos kViewInterval = std::chrono::milliseconds(250);
inline constexpr std::size_t kFollowersMax = 256;
inline constexpr std::size_t kWorkersShownMax = 1000;

class ViewFeed {
 public:
  explicit ViewFeed(Hub& hub);  // which must outlive it
  ~ViewFeed();

  // Of the model of that name, or of the first one if the name is empty. Addresses are for the
  // operator. Null: there are too many followers.
  std::shared_ptr<EventStream> follow(const std::string& model, bool with_addresses);
  std::size_t followers() const { return *followers_; }

 private:
  class Channel;
  class Follower;

  void run();

  Hub& hub_;
  std::shared_ptr<std::atomic<std::size_t>> followers_ = std::make_shared<std::atomic<std::size_t>>(0);
  Mutex mutex_;
  Condition wake_;
  bool stopping_ KVASIR_GUARDED_BY(mutex_) = false;
  std::map<std::string, std::shared_ptr<Channel>> channels_ KVASIR_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace kvasir::hub
