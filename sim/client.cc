#include "sim/client.h"

#include <algorithm>

namespace kvasir::sim {

using namespace std::chrono_literals;
using dispatch::WorkerIndex;

namespace {

constexpr Nanos kTick = 20ms;
constexpr Nanos kPingInterval = 1s;
constexpr Nanos kPongMax = 2500ms;
constexpr Nanos kHandshakeMax = 5s;

dispatch::Tuning tuning_of(const Client::Plan& plan) {
  dispatch::Tuning tuning;
  tuning.spot_check = plan.spot_check;
  tuning.lie_quarantine_max = plan.lie_quarantine_max;
  return tuning;
}

}  // namespace

Client::Client(World& world, std::vector<std::unique_ptr<Worker>>& workers, const Plan& plan, std::uint64_t seed, Canary canary)
    : world_(world), workers_(workers), plan_(plan), canary_(canary), tuning_(tuning_of(plan)), fleet_(workers.size(), tuning_, seed), controls_(workers.size()) {
  for (std::size_t d = 0; d < plan.n_drivers; ++d) {
    auto& driver = *drivers_.emplace_back(std::make_unique<Driver>());
    driver.engine = std::make_unique<dispatch::RoundEngine>(workers.size(), plan.local_allowed, tuning_);
    driver.links.resize(workers.size());
    driver.rounds_left = plan.rounds_per_driver;
    world_.after(100ms, [this, d] { begin_round(d); });
  }
  tick();
}

bool Client::finished() const {
  return std::ranges::all_of(drivers_, [](const auto& d) { return d->rounds_left == 0 && !d->in_round; });
}

void Client::more_rounds(std::size_t per_driver) {
  for (std::size_t d = 0; d < drivers_.size(); ++d) {
    drivers_[d]->rounds_left = per_driver;
    begin_round(d);
  }
}

Totals Client::totals() const {
  Totals t{.rounds = rounds_, .failed_rounds = failed_rounds_};
  t.wrong_answers = wrong_answers_;
  for (const auto& driver : drivers_) {
    const dispatch::RoundCounters& c = driver->engine->counters();
    t.pairs_remote += c.pairs_remote;
    t.pairs_local += c.pairs_local;
    t.hedges += c.hedges;
    t.late += c.late_answers;
    t.invalid += c.invalid_answers;
    t.redispatched += c.redispatched;
    t.requests += c.requests;
    t.sums_dropped += c.sums_dropped;
    t.checked += c.pairs_verified + c.pairs_wrong;
    t.lies_found += c.pairs_wrong;
  }
  return t;
}

void Client::shut_down() {
  down_ = true;
  const Totals t = totals();
  const double earned = tuning_.hedge_burst + tuning_.hedge_earned_per_request * static_cast<double>(t.requests - t.hedges);
  if (static_cast<double>(t.hedges) > earned + 1e-6) world_.fail("more hedges than the budget earned: " + std::to_string(t.hedges));
  for (auto& driver : drivers_) {
    for (WorkerIndex w = 0; w < workers_.size(); ++w) {
      if (driver->links[w].connection) driver->links[w].connection->close();
      driver->engine->link_down(w);
    }
    driver->engine->settle(fleet_, world_.now());
    if (driver->engine->outstanding() != 0) world_.fail("requests are left over in an engine");
  }
  for (WorkerIndex w = 0; w < workers_.size(); ++w)
    if (fleet_.outstanding_pairs(w) != 0)
      world_.fail("worker " + std::to_string(w) + " still counts " + std::to_string(fleet_.outstanding_pairs(w)) + " pairs as outstanding");
}

// --- the background thread ---------------------------------------------------------------

void Client::tick() {
  if (down_) return;
  for (WorkerIndex w = 0; w < workers_.size(); ++w) step_control(w);
  for (std::size_t d = 0; d < drivers_.size(); ++d)
    for (WorkerIndex w = 0; w < workers_.size(); ++w) step_data(d, w);
  world_.after(kTick, [this] { tick(); });
}

void Client::step_control(WorkerIndex w) {
  Control& control = controls_[w];
  const TimePoint now = world_.now();
  if (control.up) {
    if (control.ping_sent && now - *control.ping_sent >= kPongMax) return lose_control(w);
    if (now < control.ping_at) return;
    control.ping_at = now + kPingInterval;
    if (!control.ping_sent) control.ping_sent = now;
    control.connection->send({.kind = Message::Kind::kPing});
    return;
  }
  if (control.connection) {
    if (now >= control.connect_until) lose_control(w);
    return;
  }
  const auto due = fleet_.next_attempt(w);
  if (!due || now < *due) return;
  fleet_.on_connecting(w);
  control.connection = workers_[w]->connect();
  if (!control.connection) return lose_control(w);
  control.connect_until = now + kHandshakeMax;
  std::weak_ptr<Connection> self = control.connection;
  control.connection->listen(
      [this, w, started = now](Message message) {
        Control& c = controls_[w];
        switch (message.kind) {
          case Message::Kind::kHoldings:
            if (!c.up) {
              c.up = true;
              fleet_.on_connected(w, world_.now() - started);
            }
            fleet_.on_holdings(w, std::move(message.holdings));
            break;
          case Message::Kind::kPong:
            c.ping_sent.reset();
            fleet_.on_pong(w, message.pong, 1ms, world_.now());
            break;
          case Message::Kind::kDrain: fleet_.on_draining(w); break;
          default: break;
        }
      },
      [this, w, self] {
        if (controls_[w].connection == self.lock()) lose_control(w);
      });
  control.connection->send({.kind = Message::Kind::kHello});
}

void Client::lose_control(WorkerIndex w) {
  Control& control = controls_[w];
  const bool was_up = control.up;
  if (control.connection) control.connection->close();
  control = {};
  fleet_.on_lost(w, world_.now());
  if (!was_up) return;
  world_.trace("client loses worker %u", w);
  for (std::size_t d = 0; d < drivers_.size(); ++d)
    if (drivers_[d]->links[w].ready) take(d, {w, drivers_[d]->links[w].connection, std::nullopt});
}

void Client::step_data(std::size_t d, WorkerIndex w) {
  DataLink& data = drivers_[d]->links[w];
  const TimePoint now = world_.now();
  if (data.ready) return;
  if (data.connection) {
    if (now < data.connect_until && controls_[w].up) return;
    data.connection->close();
    data.connection.reset();
    data.next_attempt = now + 100ms;
    return;
  }
  if (!controls_[w].up || now < data.next_attempt) return;
  data.connection = workers_[w]->connect();
  if (!data.connection) {
    data.next_attempt = now + 100ms;
    return;
  }
  data.connect_until = now + kHandshakeMax;
  std::weak_ptr<Connection> weak = data.connection;
  data.connection->listen(
      [this, d, w, weak](Message message) {
        Driver& driver = *drivers_[d];
        const auto self = weak.lock();
        DataLink& link = driver.links[w];
        if (!link.ready && message.kind == Message::Kind::kHoldings) {
          link.ready = true;
          driver.engine->link_up(w);
          turn(d);
          return;
        }
        if (link.ready) take(d, {w, self, std::move(message)});
      },
      [this, d, w, weak] { take(d, {w, weak.lock(), std::nullopt}); });
  data.connection->send({.kind = Message::Kind::kHello});
}

void Client::drop_link(std::size_t d, WorkerIndex w, Nanos wait) {
  DataLink& data = drivers_[d]->links[w];
  world_.trace("driver %zu drops its link to worker %u", d, w);
  if (data.connection) data.connection->close();
  data = {};
  data.next_attempt = world_.now() + wait;
  drivers_[d]->engine->link_down(w);
}

}  // namespace kvasir::sim
