// Tells the hub, on a thread of its own and on time whatever else the process does, what the
// node holds, where it is and what it has served; answers the hub's challenges.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "gguf/moe_model.h"
#include "hub/core/segments.h"
#include "hub/client/hub_client.h"
#include "worker/served_ledger.h"

namespace kvasir::join {

struct NodeState {
  std::string model;  // empty: nothing to report yet
  hub::Segments holdings;
  std::vector<std::shared_ptr<const gguf::MoeModel>> slices;  // proofs are read from them
  std::uint16_t port = 0;  // 0: not serving
  bool relayed = false;    // waits at the hub's relay, under the worker's id
  bool direct = true;      // others can reach the port
  std::string fingerprint, ticket;
  std::uint64_t capacity_bytes = 0;
  double speed_rows_per_s = 0;
  bool draining = false;
  std::string reservation;
};

class Heartbeat {
 public:
  struct Options {
    hub::HubAddress hub;
    std::string worker_id;
    std::string device;     // what it computes on, for people to read
    std::string advertise;  // host; empty: the address from which the hub is reached
    std::shared_ptr<worker::ServedLedger> served;  // told to the hub after a beat; may be null
    std::function<void(const std::string&)> log, warn;
  };
  static Result<std::unique_ptr<Heartbeat>> start(Options options);
  ~Heartbeat();

  // Takes effect at once, not at the next beat.
  void update(const std::function<void(NodeState&)>& change);
  NodeState state() const;
  // Beats at once: the hub may think that the node is gone.
  void say_alive();
  // Whether the hub has taken a beat.
  bool known() const;
  // The hub has asked the node to move, does not know its model any more, or has another
  // version of it; reading clears it.
  bool take_move_request();
  // Of what is reported, this much the hub counts.
  std::uint64_t experts_counted() const;

 private:
  Heartbeat(Options options, std::unique_ptr<hub::HubClient> client)
      : options_(std::move(options)), client_(std::move(client)) {}
  void run();
  // One beat and the proof it may ask for; when the next is due.
  Nanos beat();
  nlohmann::json body_of(const NodeState& state) const;
  void report_service();

  const Options options_;
  std::unique_ptr<hub::HubClient> client_;
  mutable Mutex mutex_;
  Condition wake_;
  NodeState state_ KVASIR_GUARDED_BY(mutex_);
  bool changed_ KVASIR_GUARDED_BY(mutex_) = false;
  bool stopping_ KVASIR_GUARDED_BY(mutex_) = false;
  bool move_ KVASIR_GUARDED_BY(mutex_) = false;
  bool known_ KVASIR_GUARDED_BY(mutex_) = false;
  std::uint64_t counted_ KVASIR_GUARDED_BY(mutex_) = 0;
  std::vector<std::shared_ptr<const gguf::MoeModel>> refused_;  // slices whose proof failed
  std::string local_ip_;  // as the hub was last reached
  bool reachable_ = true;
  struct Report {
    std::string id;
    worker::ServedLedger::ByBackbone served;
  };
  std::optional<Report> unsent_;  // under one name until the hub has it, so that nothing counts twice
  std::string run_id_;
  std::uint64_t n_reports_ = 0;
  Nanos interval_ = std::chrono::seconds(10);  // as the hub last said
  std::thread thread_;
};

}  // namespace kvasir::join
