// A worker's door at a relay, for machines that can only dial out: keeps a socket waiting there,
// dials the next one as soon as a backbone has taken it, and hands what was taken to the
// server. Comes back by itself when the relay or the network was away.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "net/tls.h"
#include "net/websocket.h"
#include "worker/peer_io.h"

namespace kvasir::worker {

// The relay's return is noticed within these, jittered, whatever the outage lasted.
inline constexpr Nanos kRelayBackoffFirst = std::chrono::milliseconds(100);
inline constexpr Nanos kRelayBackoffMax = std::chrono::milliseconds(2500);
// A relay that refuses this worker as it is (token, name) is asked again this seldom.
inline constexpr Nanos kRelayRefusedPause = std::chrono::seconds(30);
inline constexpr Nanos kRelayConnectMax = std::chrono::seconds(5);   // TCP
inline constexpr Nanos kRelayOpenMax = std::chrono::seconds(10);     // TLS and the WebSocket's handshake
inline constexpr Nanos kRelayResolveAgain = std::chrono::seconds(30);
// Sockets kept waiting: one while nothing happens; more for a while after one was taken,
// because a backbone that comes opens several connections.
inline constexpr std::size_t kRelayWaiting = 1;
inline constexpr std::size_t kRelayWaitingBusy = 4;
inline constexpr Nanos kRelayBusy = std::chrono::seconds(10);

struct RelayListenerOptions {
  net::RelayDialer dialer;
  std::string session;
  // What passes is TLS between the backbone and this worker; without, whatever the peer speaks,
  // readable by the relay.
  std::optional<net::TlsContext> tls;
  // On the listener's thread.
  std::function<void(std::unique_ptr<net::Stream> stream, std::string peer)> accept;
  std::function<void(const std::string&)> log;
};

class RelayListener {
 public:
  explicit RelayListener(RelayListenerOptions options);
  ~RelayListener();  // what was handed over lives on

 private:
  struct Waiting {
    std::unique_ptr<net::WebSocketStream> stream;
    TimePoint deadline;  // to open
    bool open = false;
  };

  void run();
  void dial(TimePoint now);
  // False: it is gone from the list.
  bool look_at(Waiting& waiting, TimePoint now);
  void take(Waiting& waiting, TimePoint now);
  void note_failure(const Error& error, TimePoint now);
  std::size_t wanted(TimePoint now) const { return now < busy_until_ ? kRelayWaitingBusy : kRelayWaiting; }

  const RelayListenerOptions options_;
  const std::string name_;  // of the relay, for people
  std::vector<Waiting> waiting_;
  std::vector<net::Address> addresses_;
  TimePoint resolved_{}, next_dial_{}, busy_until_{};
  std::uint32_t failures_ = 0;
  std::string last_said_;
  bool was_open_ = false;
  std::uint64_t n_taken_ = 0;
  const Wake wake_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;  // last: uses all the above
};

}  // namespace kvasir::worker
