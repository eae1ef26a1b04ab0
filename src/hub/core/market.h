// The coverage market: who holds which experts of which model, which are scarce, and what a
// node that offers itself should take.
//
// A state machine: every call gives the time; nothing here reads a clock, opens a socket or
// starts a thread, and one caller at a time may use it. What a node claims counts for
// nothing until it has proved it (challenges are made here, hashes are compared outside),
// unless proofs are switched off.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "hub/core/coverage_grid.h"
#include "hub/core/segments.h"
#include "hub/core/speed_scale.h"
#include "hub/core/targets.h"

namespace kvasir::hub {

inline constexpr std::size_t kNodesMax = 262'144;
inline constexpr std::size_t kReservationsMax = 262'144;
inline constexpr std::size_t kModelsMax = 1024;
inline constexpr std::size_t kSegmentsMax = 65'536;   // of one node
inline constexpr std::size_t kAssignmentsMax = 256;   // ranges in one answer to a volunteer
inline constexpr std::uint32_t kProofSpans = 4;       // random spans of one challenge
inline constexpr std::uint64_t kProofSpanBytesMax = 64 * 1024;
// The size of an expert that nobody here knows: no offer of memory fits it.
inline constexpr std::uint64_t kUnknownExpertBytes = std::uint64_t{1} << 40;

// A line that ends may be the network's doing: the node is asked to say at once that it lives.
inline constexpr Nanos kLineGrace = std::chrono::milliseconds(700);
inline constexpr std::size_t kEndedLinesMax = 65'536;

struct MarketOptions {
  std::uint32_t target = 2;  // replicas of every expert
  bool proof = true;
  // A slice of fewer experts costs a round trip for next to nothing.
  std::uint32_t experts_min = 4;
  Nanos heartbeat = std::chrono::seconds(10);
  Nanos ttl = std::chrono::seconds(30);
  // A reservation lasts as long as a slow line needs for the slice, within bounds.
  Nanos reservation_min = std::chrono::seconds(60);
  Nanos reservation_max = std::chrono::minutes(15);
  std::uint64_t slow_line_bytes_per_s = 2'000'000;
  // A hole must have stood open this long (volunteers had their chance) before a node with
  // nothing but spare experts is asked to move, and a node moves at most once per interval.
  Nanos move_after = std::chrono::seconds(60);
  Nanos move_interval = std::chrono::hours(1);
  Nanos challenge_ttl = std::chrono::seconds(60);
  Nanos recheck_interval = std::chrono::minutes(10);
};

struct ModelShape {
  std::string name;
  std::uint32_t n_embd = 0;
  std::vector<std::uint32_t> n_expert;          // per layer; 0: dense
  std::vector<std::uint64_t> bytes_per_expert;  // per layer, what a slice of one expert adds
  std::vector<std::uint64_t> proof_bytes;       // per layer, what a proof span may lie in
  std::uint32_t n_expert_max() const;
};

// One heartbeat.
struct Coverage {
  std::string worker_id;
  std::string owner;  // whose token it came with; a worker id belongs to the first
  std::string model;
  std::string url;          // "host:port" or "relay:SESSION"
  std::string fingerprint;  // of the worker's certificate
  std::string ticket;       // what a backbone must show the worker; only backbones are told
  Segments holdings;
  double speed_rows_per_s = 0;  // as measured; 0: unknown
  std::uint64_t capacity_bytes = 0;
  std::string device;  // what it computes on, for people to read
  bool draining = false;
  std::string reservation;  // the one being fetched, to keep it
};

struct ProofSpan {
  std::uint32_t layer = 0;
  std::uint32_t expert = 0;
  std::uint64_t offset = 0;  // in the expert's bytes: its slabs one after the other
  std::uint64_t length = 0;
};

struct Challenge {
  std::string id;  // also the nonce that goes into the hash, so that answers cannot be kept
  std::vector<ProofSpan> spans;
};

struct CoverageReply {
  std::uint64_t experts_counted = 0;
  std::optional<Challenge> challenge;
  bool move = false;  // finish what you serve, then volunteer again
};

struct Offer {
  std::string model;  // empty: any
  std::optional<std::uint64_t> experts_max;
  std::optional<std::uint64_t> bytes_max;
  std::string owner;
  std::string worker_id;  // may be empty: older clients do not say
};

struct Assignment {
  const ModelShape* model = nullptr;
  std::vector<Run> runs;  // not empty; the first is the scarcest; state before this assignment
  std::string reservation;
  Nanos expires_in{};
};

struct NodeView {
  const std::string& worker_id;
  const std::string& owner;
  const std::string& model;
  const std::string& url;
  const std::string& fingerprint;
  const std::string& ticket;
  const Segments& counted;
  double speed_rows_per_s;
  std::uint64_t capacity_bytes;
  std::uint64_t experts_claimed;
  const std::string& device;
  bool draining;
  bool moving;
  bool lost;
  Nanos since_seen;
};

class Market {
 public:
  // `entropy` gives 64 unpredictable bits a call: challenges and reservation ids come from it.
  Market(MarketOptions options, std::function<std::uint64_t()> entropy);
  Market(Market&&) noexcept;
  ~Market();

  const MarketOptions& options() const { return options_; }

  // A model of the same name but another shape or content replaces the old one, whose nodes
  // then count for nothing until they have claimed and proved the new one.
  Status put_model(ModelShape shape);
  void remove_model(std::string_view name);
  const ModelShape* find_model(std::string_view name) const;
  std::vector<const ModelShape*> models() const;

  Result<CoverageReply> coverage(Coverage beat, TimePoint now);
  // The open challenge of a worker, if `id` is it.
  std::optional<Challenge> open_challenge(std::string_view worker_id, std::string_view owner,
                                          std::string_view id) const;
  void settle_proof(std::string_view worker_id, std::string_view id, bool passed, TimePoint now);
  // The node's open line to the hub has ended. Unless it is heard of again within
  // kLineGrace, it counts for nothing until its next heartbeat.
  void line_ended(std::string_view worker_id, TimePoint now);
  void line_opened(std::string_view worker_id);
  // Whose token the node came with; empty: it is not known.
  std::string find_owner(std::string_view worker_id) const;
  // The worker says goodbye, or is evicted.
  bool remove_node(std::string_view worker_id, TimePoint now);

  // Every run of every layer, in order. The model must exist.
  std::vector<Run> demand(std::string_view model, TimePoint now);
  // nullopt: nothing is scarce within these bounds. The error says why the offer is of no use.
  Result<std::optional<Assignment>> volunteer(const Offer& offer, TimePoint now);

  void report_heat(std::string_view model, std::uint32_t layer, std::span<const std::uint64_t> uses);
  void report_saturation(std::string_view model, double share);

  // Forgets what has run out and moves targets; the other calls do it too.
  void advance(TimePoint now);

  void for_each_node(TimePoint now, const std::function<void(const NodeView&)>& visit) const;
  std::size_t node_count() const { return nodes_.size(); }
  std::size_t reservation_count() const { return reservations_.size(); }
  // Changes whenever a backbone's table would.
  std::uint64_t routes_version() const { return routes_version_; }

 private:
  struct Model;
  struct Node;
  struct Reservation;

  Model* model(std::string_view name);
  void expire_nodes(TimePoint now);
  void expire_reservations(TimePoint now);
  void lose_silent_nodes(TimePoint now);
  void forget(Node& node);
  void set_counted(Node& node, Segments counted);
  void enter_grid(Node& node);
  void leave_grid(Node& node);
  void weigh(Node& node);
  void prove(Node& node, TimePoint now);
  Challenge make_challenge(const Model& model, const Segments& claims);
  bool should_move(Node& node, TimePoint now);
  void watch_scarcity(Model& model, TimePoint now);
  Result<std::uint64_t> smallest_useful(const Model& model, const Offer& offer) const;
  std::vector<Run> choose(Model& model, const Offer& offer);
  std::string reserve(Model& model, const Offer& offer, const std::vector<Run>& runs, TimePoint now, Nanos& lasts);
  void release(const std::string& id);
  Reservation* find_reservation(std::string_view id, std::string_view worker_id, std::string_view owner);
  std::string random_id();

  MarketOptions options_;
  std::function<std::uint64_t()> entropy_;
  std::map<std::string, std::unique_ptr<Model>, std::less<>> models_;

  struct TextHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  template <typename T>
  using ByText = std::unordered_map<std::string, T, TextHash, std::equal_to<>>;
  ByText<std::unique_ptr<Node>> nodes_;
  std::list<Node*> by_age_;  // least recently seen first
  std::deque<std::pair<TimePoint, std::string>> ended_lines_;  // when a node's line ended; oldest first
  ByText<std::unique_ptr<Reservation>> reservations_;
  std::set<std::pair<TimePoint, Reservation*>> by_expiry_;
  ByText<Reservation*> by_worker_;  // reservations whose worker said who it is
  SpeedScale speeds_;
  std::optional<TimePoint> watched_;
  std::uint64_t routes_version_ = 1;
  std::uint64_t experts_moving_ = 0;  // told to move and not gone yet
};

}  // namespace kvasir::hub
