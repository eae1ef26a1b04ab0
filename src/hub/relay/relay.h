// The relay: joins a worker's WebSocket and a backbone's into one stream of bytes, so that a
// worker that can only dial out can be reached. What passes is TLS between the two; the
// relay can neither read nor forge it.
//
// A worker keeps a socket waiting under its session's name (its worker id) and dials another
// as soon as that one is taken, which its first bytes tell. A backbone that asks for a session
// takes the newest waiting socket, or waits a moment for the next. So one worker serves several
// backbones, and several connections of each. The relay dials nowhere: it joins sockets that
// came to it, and cannot be made to reach anything else.
//
// Every pair has a bounded buffer of its own for each direction and reads no faster than the
// other end takes. Everything is bounded: sockets that wait, pairs, in all and of one session
// and one token.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hub/relay/end.h"
#include "hub/relay/relay_host.h"

namespace kvasir::hub {

// Why a request is refused before its WebSocket opens.
struct RelayRefusal {
  unsigned status = 503;
  std::string sentence;
};

// A worker's socket that waits, or was taken for a backbone.
struct RelaySlot;
using RelaySlotPtr = std::shared_ptr<RelaySlot>;

class Relay {
 public:
  // `executor` is where the watchman runs; `recorders` has threads that may block.
  static std::shared_ptr<Relay> create(RelayOptions options, RelayHost& host, asio::any_io_executor executor,
                                       asio::thread_pool& recorders, std::function<void(const std::string&)> log);
  virtual ~Relay() = default;

  // Whether a worker of that token may wait under that name; blocks on the host. Asked before
  // its 101.
  virtual std::optional<RelayRefusal> refuse_worker(const std::string& session, const std::string& token_id) = 0;
  // A worker's socket after its 101. Returns at once.
  virtual void add_worker(std::shared_ptr<End> worker, std::string session, std::string token_id) = 0;

  // The address of another hub at which that worker waits, if it does not wait here; or empty.
  // Blocks on the host.
  virtual std::string find_elsewhere(const std::string& session) = 0;
  // For a backbone before its 101: a waiting socket of that session, after a moment if need be;
  // or null, and `refusal` says why. What was taken is to be given to join() or give_up().
  virtual asio::awaitable<RelaySlotPtr> take_worker(std::string session, std::string token_id,
                                                    RelayRefusal& refusal) = 0;
  virtual void join(RelaySlotPtr worker, std::shared_ptr<End> backbone) = 0;
  virtual void give_up(RelaySlotPtr worker) = 0;

  virtual RelayStats stats() const = 0;
  // Closes every socket with kRestart and records what was metered; blocks.
  virtual void stop() = 0;
  // After the last thread of the executor has ended, and before its sockets' service does.
  virtual void forget_sockets() = 0;
};

inline constexpr std::size_t kRelaySessionBytesMax = 128;
// A session is named like a worker: letters, digits and . _ - : @
bool is_session_name(std::string_view name);

}  // namespace kvasir::hub
