// The session grants of one backbone: asked for at its hub, shown to workers by the dispatcher.
//
// One thread asks (renew); those that connect only look (find), and never wait for the hub. A
// worker for which there is no grant, or which refuses the one it was shown, is shown its
// ticket instead.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "dispatch/dispatcher.h"
#include "hub/client/hub_client.h"

namespace kvasir::plugin {

class SessionGrants : public std::enable_shared_from_this<SessionGrants> {
 public:
  // With a key of its own, which never leaves this process.
  static Result<std::shared_ptr<SessionGrants>> make();

  // For dispatch::Options; keeps this alive.
  dispatch::GrantSource source();

  // Asks for those of these workers that have none, or one that is half over; forgets all
  // others. The error is a sentence for the log, once for each time that there begin to be none.
  Status renew(hub::HubClient& hub, const std::vector<std::string>& workers, TimePoint now);

  // Valid now, or empty.
  std::string find(const std::string& worker, TimePoint now);
  // The worker did not take it: not shown again.
  void refused(const std::string& worker);

 private:
  struct Held {
    std::string text;  // empty: the hub gives none, or the worker took it badly
    TimePoint renew_at, expires;
  };

  explicit SessionGrants(net::SigningKey key) : key_(std::move(key)) {}
  Status without(const std::string& why, TimePoint now);

  const net::SigningKey key_;
  Mutex mutex_;
  std::map<std::string, Held> held_ KVASIR_GUARDED_BY(mutex_);
  // Of the thread that asks:
  TimePoint ask_again_{};
  bool without_said_ = false;
};

}  // namespace kvasir::plugin
