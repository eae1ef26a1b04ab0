// Reaches one worker by whichever ways it has, both at once: its own address, and the relay it
// waits at. The direct way is preferred: it gets a head start before the relay's is taken.
#pragma once

#include <poll.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dispatch/client/handshake.h"

namespace kvasir::dispatch {

// A direct connection that is slower than this is not worth waiting for: the relay's serves
// meanwhile, and the direct way is tried again later.
inline constexpr Nanos kDirectHeadStart = std::chrono::milliseconds(300);

class Dial {
 public:
  // `only`: that way alone.
  Dial(const Peer& peer, const wire::Hello& hello, const net::TlsContext* tls, TimePoint now,
       std::optional<Way> only = std::nullopt);

  Handshake::State step(TimePoint now);
  // What to poll for, and when to step though nothing came.
  void gather(std::vector<pollfd>& fds, TimePoint& wake) const;

  // After kDone:
  Way way() const { return way_; }
  std::unique_ptr<Link> take_link() { return winner_->take_link(); }
  wire::Holdings take_holdings() { return winner_->take_holdings(); }
  Nanos round_trip() const { return winner_->round_trip(); }
  // After kFailed and kRefused:
  const std::string& error() const { return error_; }

 private:
  Handshake::State win(std::unique_ptr<Handshake>& attempt, Way way);
  void lose(std::unique_ptr<Handshake>& attempt, Handshake::State state, std::string_view prefix);

  std::unique_ptr<Handshake> direct_, relayed_, winner_;
  bool relayed_done_ = false;  // and waits for the direct one's head start to pass
  bool refused_ = false;
  TimePoint direct_until_;
  Way way_ = Way::kDirect;
  std::string error_;
};

}  // namespace kvasir::dispatch
