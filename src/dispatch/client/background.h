// The thread that knows the workers: their table, one control connection to each (HELLO,
// HOLDINGS, PING), reconnection with back-off, and the making of data links for every driver.
#pragma once

#include <poll.h>

#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "dispatch/client/dial.h"
#include "dispatch/client/shared.h"

namespace kvasir::dispatch {

inline constexpr Nanos kPingInterval = std::chrono::seconds(1);
// A worker is lost when a ping stays unanswered this long: it may be stopped, its host gone,
// or something between swallow bytes with the socket open.
inline constexpr Nanos kPongMax = std::chrono::milliseconds(2500);
inline constexpr Nanos kResolveAgain = std::chrono::seconds(30);
// A data link that lasts shorter than this counts as a failed attempt.
inline constexpr Nanos kLinkLifeMin = std::chrono::seconds(10);
// A worker reached through the relay is tried directly this often: its network may have changed.
inline constexpr Nanos kDirectAgain = std::chrono::seconds(10);
// A worker that shares no layer with the model is mentioned this long after the first round.
inline constexpr Nanos kHoldsNothingAfter = std::chrono::seconds(5);

class Background {
 public:
  static Result<std::unique_ptr<Background>> start(Shared& shared);
  ~Background();

 private:
  // A slot of the table: free, of a worker, or of one that was removed and that drivers still
  // have links to.
  enum class Use : std::uint8_t { kFree, kWorker, kRemoved };
  struct Control {
    Use use = Use::kFree;
    Peer peer;
    wire::Hello hello;
    TimePoint resolve_at{};
    std::unique_ptr<Dial> attempt;
    std::unique_ptr<Link> link;
    Way way = Way::kDirect;        // of the link
    TimePoint direct_at{};         // of a relayed link: the next attempt at a direct one
    std::unique_ptr<Dial> direct;  // that attempt
    TimePoint ping_at{};
    std::optional<TimePoint> ping_sent;  // of the oldest unanswered one
    bool was_up = false;
    std::string last_refusal;   // logged once
    bool unreachable_said = false;
    bool nothing_held_said = false;
    bool in_the_clear_said = false;
    bool relayed_said = false;
    std::vector<LayerKey> held;  // of the last HOLDINGS
  };
  // A driver's link to one worker, as far as this thread is concerned.
  struct DataLink {
    std::unique_ptr<Dial> attempt;
    bool handed_over = false;
    bool leaving = false;  // the worker was removed, and the driver may still have the link
    TimePoint handed_at{};
    TimePoint next_attempt{};
    std::uint32_t failures = 0;
  };
  struct Driver {
    std::shared_ptr<Port> port;
    std::vector<DataLink> links;  // by worker
  };

  explicit Background(Shared& shared) : shared_(shared) {}
  void run();
  // The table (table.cc).
  void sync_table();
  void add_worker(const WorkerAddress& where, std::optional<WorkerIndex> before);
  void remove_worker(WorkerIndex w);
  void release_workers();
  Status prepare_peer(const WorkerAddress& where, Peer& peer);
  void sync_drivers(TimePoint now);
  void step_control(WorkerIndex w, TimePoint now);
  void begin_attempt(WorkerIndex w, TimePoint now);
  void finish_attempt(WorkerIndex w, Handshake::State state, TimePoint now);
  Status resolve(Control& control, TimePoint now);
  void try_direct(WorkerIndex w, TimePoint now);
  void read_control(WorkerIndex w, TimePoint now);
  bool on_control_frame(WorkerIndex w, const net::Frame& frame, TimePoint now);
  void take_holdings(WorkerIndex w, wire::Holdings holdings);
  void ping(WorkerIndex w, TimePoint now);
  void lose_control(WorkerIndex w, const std::string& why, TimePoint now);
  void step_data(Driver& driver, WorkerIndex w, TimePoint now);
  void say_who_holds_nothing(TimePoint now);
  const net::TlsContext* tls() const { return tls_ ? &*tls_ : nullptr; }
  // Collects descriptors and the time of the next thing to do.
  TimePoint gather(std::vector<pollfd>& fds, TimePoint now);

  Shared& shared_;
  std::optional<net::TlsContext> tls_;
  std::optional<net::RelayDialer> relay_;
  std::vector<net::Address> relay_addresses_;
  TimePoint relay_resolve_at_{};
  std::vector<Control> controls_;
  std::vector<Driver> drivers_;
  std::optional<TimePoint> layers_seen_;
  bool table_full_said_ = false;
  Rng jitter_{0x6b76};
  std::thread thread_;
};

}  // namespace kvasir::dispatch
