// Makes one connection without blocking: TCP or a relay's WebSocket, TLS where a fingerprint is
// pinned, HELLO both ways, and the worker's first HOLDINGS.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "dispatch/client/link.h"
#include "dispatch/dispatcher.h"
#include "net/connect.h"
#include "net/tls.h"

namespace kvasir::dispatch {

inline constexpr Nanos kHandshakeMax = std::chrono::seconds(5);

// A configured worker, as the background thread knows it.
struct Peer {
  WorkerAddress where;
  std::string name;  // see worker_name()
  std::vector<net::Address> addresses;  // resolved; empty: to be resolved
  std::optional<net::Fingerprint> fingerprint;
  std::optional<net::RelayDialer> relay;      // where it waits under where.relay
  std::vector<net::Address> relay_addresses;  // resolved
  const GrantSource* grants = nullptr;        // outlives the peer
};

enum class Way { kDirect, kRelay };
inline bool has_way(const Peer& peer, Way way) {
  return way == Way::kDirect ? !peer.where.host.empty() : peer.relay && !peer.where.relay.empty();
}
// "host:port", or "relay:SESSION" where it has no address of its own.
std::string worker_name(const WorkerAddress& worker);

// On this machine, where bytes in the clear meet nobody else.
bool is_loopback(const std::string& host);

class Handshake {
 public:
  enum class State {
    kPending,  // poll fd() for wants()
    kDone,     // take the results
    kFailed,   // could not connect; another attempt may work
    kRefused,  // answered, and will not work with us as we are: error() has its sentence
  };

  // `tls` is needed where the peer has a fingerprint. Tries the peer's addresses in turn.
  Handshake(const Peer& peer, const wire::Hello& hello, const net::TlsContext* tls, TimePoint now,
            Way way = Way::kDirect);

  State step(TimePoint now);
  int fd() const;
  short wants() const;
  TimePoint deadline() const { return deadline_; }

  std::unique_ptr<Link> take_link() { return std::move(link_); }
  wire::Holdings take_holdings() { return std::move(holdings_); }
  Nanos round_trip() const { return round_trip_; }  // of HELLO, or of TLS and HELLO
  const std::string& error() const { return error_; }

 private:
  enum class Phase { kStart, kConnecting, kTls, kHello, kHoldings };
  State fail(State state, std::string error);
  bool follow();  // the worker waits at another hub: begins anew there, once
  State start_next(TimePoint now);
  State open_stream(TimePoint now);
  Result<std::unique_ptr<net::Stream>> make_stream();
  const std::vector<net::Address>& addresses() const {
    return way_ == Way::kDirect ? peer_.addresses : moved_ ? moved_addresses_ : peer_.relay_addresses;
  }
  // HELLO, or with a grant what comes before it: the grant's proof is over the TLS session.
  State send_hello(TimePoint now);
  State read_frames(TimePoint now);
  State on_hello(ByteSpan payload, TimePoint now);

  const Peer peer_;  // a copy: its addresses may be resolved anew meanwhile
  wire::Hello hello_;
  std::string grant_;  // its proof is made when TLS stands
  const net::TlsContext* tls_;
  const Way way_;
  const net::WebSocketStream* relayed_ = nullptr;  // of link_
  std::optional<net::RelayDialer> moved_;
  std::vector<net::Address> moved_addresses_;
  TimePoint deadline_;
  Phase phase_ = Phase::kStart;
  std::size_t next_address_ = 0;
  TimePoint address_until_{};
  net::Fd socket_;  // while connecting
  std::unique_ptr<Link> link_;
  TimePoint hello_sent_{};
  Nanos round_trip_{};
  wire::Holdings holdings_;
  std::string error_;
};

}  // namespace kvasir::dispatch
