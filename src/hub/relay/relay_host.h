// What the relay asks of its hub, and the figures and limits that others see. No sockets here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"

namespace kvasir::hub {

struct RelayOptions {
  std::size_t waiting_max = 16'384;
  std::size_t waiting_per_session_max = 8;
  std::size_t waiting_per_token_max = 8'192;
  std::size_t pairs_max = 8'192;
  std::size_t pairs_per_session_max = 64;   // as many connections as a worker takes
  std::size_t pairs_per_token_max = 1'024;  // of a backbone
  std::size_t askers_max = 1'024;           // backbones that wait for a worker's next socket
  Nanos answer_wait = std::chrono::seconds(3);
  Nanos ping_waiting = std::chrono::seconds(10);
  Nanos ping_paired = std::chrono::seconds(5);
  // Without any frame, while the relay listens. A worker computes on the thread that would
  // answer a ping, hence the long one; a host that is gone is noticed by TCP much sooner.
  Nanos silence_waiting = std::chrono::seconds(25);
  Nanos silence_paired = std::chrono::seconds(90);
  Nanos stall = std::chrono::seconds(30);    // an end that takes no bytes
  Nanos idle = std::chrono::minutes(30);     // a pair without bytes
  Nanos close_wait = std::chrono::seconds(2);  // for the answer to a close
  Nanos report_interval = std::chrono::seconds(5);
};

struct RelayUse {
  std::string session;   // the worker's id
  std::string backbone;  // its token's id
  std::uint64_t to_worker_bytes = 0;
  std::uint64_t to_backbone_bytes = 0;
};

// What the relay asks of its hub; calls may block and come from the handlers' threads.
class RelayHost {
 public:
  virtual ~RelayHost() = default;
  // Whether a worker with that token may wait under that name.
  virtual Result<bool> may_serve(const std::string& session, const std::string& token_id) = 0;
  virtual bool is_banned(const std::string& session) = 0;
  // Where several hubs share a store: a worker waits here; and the address of another hub at
  // which it said last that it waits, or empty.
  virtual void waits_here(const std::string& /*session*/) {}
  virtual std::string waits_elsewhere(const std::string& /*session*/) { return {}; }
  virtual Status record(const std::vector<RelayUse>& uses) = 0;
};

struct RelayStats {
  std::size_t waiting = 0;
  std::size_t pairs = 0;
  std::uint64_t bytes = 0;  // both directions, since the start
};

}  // namespace kvasir::hub
