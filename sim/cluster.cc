#include "sim/cluster.h"

#include <algorithm>
#include <utility>

namespace kvasir::sim {

using namespace std::chrono_literals;

std::uint64_t oracle(std::uint32_t layer, std::uint64_t row, std::uint32_t expert) {
  Rng rng(row * 0x9e3779b97f4a7c15u + layer * 1000003u + expert);
  rng.next();
  return rng.next();
}

wire::LayerId layer_id(std::uint32_t layer) {
  wire::LayerId id{};
  id[0] = static_cast<std::byte>(layer + 1);
  return id;
}

// --- connection --------------------------------------------------------------------------

Connection::Connection(World& world, Worker& worker, Nanos delay, Nanos jitter)
    : world_(world), worker_(worker), delay_(delay), jitter_(jitter) {}

void Connection::listen(OnMessage on_message, OnClose on_close) {
  on_message_ = std::move(on_message);
  on_close_ = std::move(on_close);
}

Nanos Connection::delay() const { return delay_ + world_.between(Nanos(0), jitter_); }

void Connection::send(Message message) {
  if (!open_ || swallowing_) return;
  last_out_ = std::max(last_out_, world_.now() + delay() + slow_);
  world_.at(last_out_, [self = shared_from_this(), message = std::move(message)]() mutable {
    if (self->open_ && !self->swallowing_) self->worker_.receive(self, std::move(message));
  });
}

void Connection::reply(Message message) {
  if (!open_ || swallowing_) return;
  last_back_ = std::max(last_back_, world_.now() + delay());
  world_.at(last_back_, [self = shared_from_this(), message = std::move(message)]() mutable {
    if (self->open_ && !self->swallowing_ && self->on_message_) self->on_message_(std::move(message));
  });
}

void Connection::close() {
  open_ = false;
  on_message_ = nullptr;
  on_close_ = nullptr;
}

void Connection::swallow() {
  constexpr Nanos kKeepAlive = 20s;
  swallowing_ = true;
  world_.after(kKeepAlive, [self = shared_from_this()] {
    self->swallowing_ = false;
    self->reset();
  });
}

void Connection::slow_reader(Nanos by, Nanos duration) {
  slow_ += by;
  world_.after(duration, [self = shared_from_this(), by] { self->slow_ -= by; });
}

void Connection::reset() {
  if (swallowing_) return;  // the news is swallowed too
  last_back_ = std::max(last_back_, world_.now() + delay());
  world_.at(last_back_, [self = shared_from_this()] {
    if (!self->open_) return;
    self->open_ = false;
    if (const OnClose told = std::move(self->on_close_)) told();
  });
}

// --- worker ------------------------------------------------------------------------------

Worker::Worker(World& world, std::uint32_t i) : index(i), world_(world), held_(kLayers) {
  delay_ = world.between(20us, world.chance(0.3) ? 20ms : 500us);
  jitter_ = world.between(0us, delay_);
  fixed_ = world.between(50us, 2ms);
  per_pair_ = world.between(20us, 400us);
  queue_max_ = 1 + world.rng.below(8);
}

void Worker::be_as_fast_as(const Worker& other) {
  delay_ = other.delay_;
  jitter_ = other.jitter_;
  fixed_ = other.fixed_;
  per_pair_ = other.per_pair_;
  queue_max_ = other.queue_max_;
}

std::shared_ptr<Connection> Worker::connect() {
  if (!alive_) return nullptr;
  auto connection = std::make_shared<Connection>(world_, *this, delay_, jitter_);
  std::erase_if(connections_, [](const auto& old) { return old.expired(); });
  connections_.push_back(connection);
  return connection;
}

wire::Holdings Worker::holdings() const {
  wire::Holdings out;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    if (held_[layer].empty()) continue;
    out.entries.push_back({.layer_id = layer_id(layer), .layer = layer, .n_expert = kExperts, .n_embd = kWidth, .experts = held_[layer]});
  }
  return out;
}

void Worker::receive(const std::shared_ptr<Connection>& from, Message message) {
  if (!alive_) return;
  if (world_.now() < stopped_until_) {
    world_.at(stopped_until_, [this, from, message = std::move(message), incarnation = incarnation_]() mutable {
      if (incarnation == incarnation_) receive(from, std::move(message));
    });
    return;
  }
  switch (message.kind) {
    case Message::Kind::kHello: {
      from->reply({.kind = Message::Kind::kHello});
      Message list{.kind = Message::Kind::kHoldings};
      list.holdings = holdings();
      return from->reply(std::move(list));
    }
    case Message::Kind::kPing: {
      Message pong{.kind = Message::Kind::kPong};
      pong.pong.queued = lies_in_pongs ? static_cast<std::uint32_t>(world_.rng.next()) : static_cast<std::uint32_t>(queue_.size());
      pong.pong.wait_us = lies_in_pongs ? static_cast<std::uint32_t>(world_.rng.next()) : 0;
      pong.pong.row_us = lies_in_pongs ? static_cast<std::uint32_t>(world_.rng.next()) : 100;
      return from->reply(std::move(pong));
    }
    case Message::Kind::kCancel: {
      const auto queued = std::ranges::find_if(queue_, [&](const Job& job) { return job.request.id == message.id && job.from.lock() == from; });
      if (queued == queue_.end()) return;  // its answer is on the way, or will be
      queue_.erase(queued);
      return from->reply({.kind = Message::Kind::kError, .id = message.id, .code = wire::ErrorCode::kCancelled});
    }
    case Message::Kind::kExec: break;
    default: return world_.fail("the client sent a message that is a worker's");
  }
  const auto refuse = [&](wire::ErrorCode code) { from->reply({.kind = Message::Kind::kError, .id = message.id, .code = code}); };
  if (draining_) return refuse(wire::ErrorCode::kDraining);
  if (queue_.size() >= queue_max_) return refuse(wire::ErrorCode::kBusy);
  if (world_.chance(error_chance)) return refuse(wire::ErrorCode::kInternal);
  for (const wire::Pair& pair : message.pairs)
    if (!held_[message.layer].contains(pair.expert)) return refuse(wire::ErrorCode::kExpertNotHeld);
  queue_.push_back({from, std::move(message)});
  start_next();
}

void Worker::start_next() {
  if (busy_ || queue_.empty()) return;
  busy_ = true;
  Job job = std::move(queue_.front());
  queue_.pop_front();
  const auto pairs = static_cast<std::int64_t>(job.request.pairs.size());
  const double factor = slowness * (0.8 + 0.4 * world_.rng.unit());
  const Nanos work = Nanos(static_cast<std::int64_t>(static_cast<double>((fixed_ + per_pair_ * pairs).count()) * factor));
  const TimePoint done = std::max(world_.now(), stopped_until_) + work;
  world_.at(done, [this, job = std::move(job), incarnation = incarnation_] {
    if (incarnation != incarnation_) return;
    if (world_.now() < stopped_until_) {  // stopped in mid-compute
      world_.at(stopped_until_, [this, job, incarnation] {
        if (incarnation == incarnation_) answer(job);
      });
      return;
    }
    answer(job);
  });
}

// A row is a number here, so a changed bit, a norm that is off, an older answer and another
// expert's are all another number; NaN has its own fault.
std::uint64_t Worker::maybe_lie(std::uint64_t honest, const Message& request, wire::Pair pair) {
  const std::uint64_t older = std::exchange(older_answer_, honest);
  if (lie_chance == 0 || !world_.chance(lie_chance)) return honest;
  ++lies_told;
  switch (world_.rng.below(4)) {
    // With the worker's number in it: liars do not work together.
    case 0: return honest ^ std::uint64_t{1} << (8 * world_.rng.below(8) + index);
    case 1: return honest + honest / 100 + 1 + index;
    case 2: return older == honest ? honest + 1 : older;
    default: return oracle(request.layer, request.rows.at(pair.row), (pair.expert + 1 + index) % kExperts);
  }
}

std::vector<std::uint64_t> Worker::answers_to(const Message& request) {
  std::vector<std::uint64_t> rows(request.weights.empty() ? request.pairs.size() : request.rows.size(), 0);
  for (std::size_t i = 0; i < request.pairs.size(); ++i) {
    const wire::Pair pair = request.pairs[i];
    const std::uint64_t value = oracle(request.layer, request.rows.at(pair.row), pair.expert);
    if (request.weights.empty()) rows[i] = maybe_lie(value, request, pair);
    else rows[pair.row] += request.weights[i] * value;
  }
  return rows;
}

void Worker::answer(const Job& job) {
  busy_ = false;
  if (const auto to = job.from.lock()) {
    const Message& request = job.request;
    const std::vector<std::uint64_t> rows = answers_to(request);
    pairs_answered += request.pairs.size();
    const auto n = static_cast<std::uint32_t>(rows.size());
    const int copies = world_.chance(twice_chance) ? 2 : 1;
    for (int copy = 0; copy < copies; ++copy) {
      const std::uint32_t per_frame = world_.chance(0.3) ? 1 + world_.rng.below(n) : n;
      for (std::uint32_t first = 0; first < n; first += per_frame) {
        Message frame{.kind = Message::Kind::kResult, .id = request.id};
        const std::uint32_t count = std::min(per_frame, n - first);
        frame.head = {.row_type = request.result_type, .n_embd = kWidth, .first_row = first, .n_rows = count, .total_rows = n, .compute_us = 0};
        frame.more = first + count < n;
        for (std::uint32_t i = first; i < first + count; ++i) {
          frame.answers.push_back(rows[i]);
          frame.states.push_back(RowState::kFinite);
        }
        if (world_.chance(nan_chance)) {
          const std::uint32_t at = world_.rng.below(count);
          frame.states[at] = RowState::kNan;
          frame.answers[at] ^= 1;
        }
        if (request.result_type != wire::RowType::kF32 && world_.chance(overflow_chance)) {  // no fault
          const std::uint32_t at = world_.rng.below(count);
          frame.states[at] = RowState::kInfinite;
          frame.answers[at] ^= 1;
        }
        if (world_.chance(damage_chance)) {
          frame.damaged = true;
          frame.answers[world_.rng.below(count)] ^= 1;
        }
        if (world_.chance(shape_chance)) {
          switch (world_.rng.below(5)) {
            case 0: frame.head.total_rows += 1; break;
            case 1: frame.head.first_row += 1; break;
            case 2: frame.head.n_embd += 8; break;
            case 3: frame.more = !frame.more; break;
            default: frame.head.row_type = wire::RowType::kBF16;
          }
        }
        to->reply(std::move(frame));
      }
    }
  }
  start_next();
}

// --- faults ------------------------------------------------------------------------------

void Worker::close_all() {
  for (const auto& weak : connections_)
    if (const auto connection = weak.lock()) connection->reset();
  connections_.clear();
  queue_.clear();
  busy_ = false;
  ++incarnation_;
}

void Worker::crash(Nanos restart_after) {
  if (!alive_) return;
  world_.trace("worker %u crashes, back in %.1f ms", index, static_cast<double>(restart_after.count()) / 1e6);
  alive_ = false;
  close_all();
  world_.after(restart_after, [this] {
    alive_ = true;
    draining_ = false;
    stopped_until_ = {};
  });
}

void Worker::stop_process(Nanos duration) {
  world_.trace("worker %u is stopped for %.1f ms", index, static_cast<double>(duration.count()) / 1e6);
  stopped_until_ = std::max(stopped_until_, world_.now() + duration);
}

void Worker::drain_and_restart(Nanos after) {
  if (!alive_ || draining_) return;
  world_.trace("worker %u drains", index);
  draining_ = true;
  for (const auto& weak : connections_)
    if (const auto connection = weak.lock()) connection->reply({.kind = Message::Kind::kDrain});
  world_.after(after, [this, incarnation = incarnation_] {
    if (incarnation == incarnation_) crash(10ms);
  });
}

void Worker::change_holdings() {
  if (!alive_) return;
  // Takes one range on; giving experts up happens by restart with other slices.
  const std::uint32_t layer = world_.rng.below(kLayers);
  const std::uint32_t begin = world_.rng.below(kExperts);
  held_[layer].add({begin, std::min(kExperts, begin + 1 + world_.rng.below(6))});
  if (world_.chance(0.3) && held_[layer].size() > 4) {
    std::vector<std::uint32_t> ids = held_[layer].ids();
    ids.erase(ids.begin() + world_.rng.below(static_cast<std::uint32_t>(ids.size())));
    held_[layer] = ExpertSet::from_ids(std::move(ids));
  }
  world_.trace("worker %u changes its holdings", index);
  announce();
}

void Worker::announce() {
  for (const auto& weak : connections_) {
    if (const auto connection = weak.lock()) {
      Message list{.kind = Message::Kind::kHoldings};
      list.holdings = holdings();
      connection->reply(std::move(list));
    }
  }
}

Connection* Worker::some_connection() {
  if (connections_.empty()) return nullptr;
  const auto connection = connections_[world_.rng.below(static_cast<std::uint32_t>(connections_.size()))].lock();
  return connection ? connection.get() : nullptr;  // the client's end keeps it alive
}

void Worker::reset_some_connection() {
  if (Connection* connection = some_connection()) connection->reset();
}
void Worker::swallow_some_connection() {
  if (Connection* connection = some_connection()) connection->swallow();
}
void Worker::slow_some_connection(Nanos by, Nanos duration) {
  if (Connection* connection = some_connection()) connection->slow_reader(by, duration);
}

void Worker::heal() {
  slowness = 1;
  nan_chance = overflow_chance = damage_chance = shape_chance = twice_chance = error_chance = lie_chance = 0;
  lies_in_pongs = false;
}

void Worker::heal_for_good() {
  heal();
  queue_max_ = 1024;
}

}  // namespace kvasir::sim
