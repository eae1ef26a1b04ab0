// Workers and the network between them and the client, with faults.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/expert_set.h"
#include "dispatch/core/round_engine.h"
#include "sim/world.h"
#include "wire/messages.h"

namespace kvasir::sim {

using dispatch::RowState;

inline constexpr std::uint32_t kLayers = 3;
inline constexpr std::uint32_t kExperts = 24;
inline constexpr std::uint32_t kWidth = 8;

// A row is a number; an expert's answer for it is a hash, so that a row, expert or layer
// mixed up anywhere gives another value. Weighted sums are taken modulo 2^64, where the order
// of additions does not matter: a pair that counts twice or not at all changes them.
std::uint64_t oracle(std::uint32_t layer, std::uint64_t row, std::uint32_t expert);
wire::LayerId layer_id(std::uint32_t layer);

struct Message {
  enum class Kind { kHello, kHoldings, kExec, kCancel, kResult, kError, kPing, kPong, kDrain };
  Kind kind = Kind::kPing;
  std::uint64_t id = 0;
  // kExec
  std::uint32_t layer = 0;
  std::vector<std::uint64_t> rows{};
  std::vector<wire::Pair> pairs{};
  std::vector<std::uint64_t> weights{};  // one per pair: sums are wanted
  wire::RowType result_type = wire::RowType::kF32;
  // kResult
  wire::ResultHead head{};
  bool more = false;
  std::vector<std::uint64_t> answers{};
  std::vector<RowState> states{};
  bool damaged = false;  // the checksum does not match
  // others
  wire::ErrorCode code = wire::ErrorCode::kUnknown;
  wire::Holdings holdings{};
  wire::Pong pong{};
};

class Worker;

// One TCP connection. Messages keep their order in each direction; different connections
// overtake each other. Delivery needs both ends alive.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  using OnMessage = std::function<void(Message)>;
  using OnClose = std::function<void()>;

  Connection(World& world, Worker& worker, Nanos delay, Nanos jitter);
  // The client's end. `on_close` runs at most once, and not after close().
  void listen(OnMessage on_message, OnClose on_close);
  void send(Message message);
  void close();
  bool open() const { return open_; }

  // --- the worker's end and the faults ---
  void reply(Message message);
  void reset();                         // both ends are told, after a delay
  // Half-open: what is sent from now on vanishes, until TCP's keep-alive gives up.
  void swallow();
  void slow_reader(Nanos by, Nanos duration);

 private:
  Nanos delay() const;
  World& world_;
  Worker& worker_;
  const Nanos delay_, jitter_;
  Nanos slow_{};
  bool open_ = true, swallowing_ = false;
  TimePoint last_out_{}, last_back_{};
  OnMessage on_message_;
  OnClose on_close_;
};

// The worker's admission and a queue in front of one engine.
class Worker {
 public:
  Worker(World& world, std::uint32_t index);

  // Null: refused at once (nobody listens).
  std::shared_ptr<Connection> connect();
  void receive(const std::shared_ptr<Connection>& from, Message message);

  // --- faults ---
  void crash(Nanos restart_after);
  void stop_process(Nanos duration);  // SIGSTOP: sockets stay open
  void drain_and_restart(Nanos after);
  void change_holdings();
  void announce();  // HOLDINGS, on every connection
  void reset_some_connection();
  void swallow_some_connection();
  void slow_some_connection(Nanos by, Nanos duration);
  void heal();          // of what holds for a while
  void heal_for_good();  // and room in the queue for every driver

  wire::Holdings holdings() const;
  const ExpertSet& experts(std::uint32_t layer) const { return held_[layer]; }
  void hold(std::uint32_t layer, std::uint32_t expert) { held_[layer].add({expert, expert + 1}); }
  bool alive() const { return alive_; }
  void be_as_fast_as(const Worker& other);

  std::uint32_t index = 0;
  // Set for a while by the fault schedule.
  double slowness = 1;
  double nan_chance = 0, overflow_chance = 0, damage_chance = 0, shape_chance = 0, twice_chance = 0, error_chance = 0;
  double lie_chance = 0;  // of each row answered, where rows answer pairs
  std::uint64_t lies_told = 0;
  std::uint64_t pairs_answered = 0;
  bool lies_in_pongs = false;  // its clock jumped: figures in PONG are nonsense

 private:
  struct Job {
    std::weak_ptr<Connection> from;
    Message request;
  };
  void start_next();
  void answer(const Job& job);
  std::vector<std::uint64_t> answers_to(const Message& request);
  std::uint64_t maybe_lie(std::uint64_t honest, const Message& request, wire::Pair pair);
  Connection* some_connection();
  void close_all();

  World& world_;
  bool alive_ = true, draining_ = false, busy_ = false;
  std::uint32_t incarnation_ = 0;
  TimePoint stopped_until_{};
  Nanos delay_, jitter_, fixed_, per_pair_;
  std::size_t queue_max_;
  std::deque<Job> queue_;
  std::uint64_t older_answer_ = 1;
  std::vector<ExpertSet> held_;
  std::vector<std::weak_ptr<Connection>> connections_;
};

}  // namespace kvasir::sim
