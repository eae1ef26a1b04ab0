// What the relay knows of its sockets: those that wait and those that are joined. Inside the
// relay only.
#pragma once

#include "hub/relay/relay.h"

namespace kvasir::hub {

struct RelayPair {
  std::shared_ptr<End> worker, backbone;
  std::string session, token_id;  // the backbone's
  std::atomic<std::uint64_t> to_worker_bytes{0}, to_backbone_bytes{0};
  std::atomic<std::int64_t> moved_ns{End::now_ns()};
  // The registry's, under its mutex: what has been put down for the ledger.
  std::uint64_t to_worker_noted = 0, to_backbone_noted = 0;
  // On the pair's executor:
  int pumps = 2;
  bool ending = false;
};

struct RelaySlot {
  std::shared_ptr<End> end;
  std::string session, token_id;  // the worker's
  std::string backbone_token_id;  // who has taken it
  // On the socket's executor:
  std::shared_ptr<RelayPair> pair;
  bool dead = false;
};

// Carries bytes until one end fails, and says which and why. `got`: what was read from `from`
// already.
struct PumpEnd {
  bool from_failed = true;  // else `to` did
  bool in_order = false;    // closed, rather than lost
};
asio::awaitable<PumpEnd> pump(End& from, End& to, std::atomic<std::uint64_t>& bytes,
                              std::atomic<std::int64_t>& moved_ns, End::Got got);

}  // namespace kvasir::hub
