#include "sim/client.h"

#include <algorithm>
#include <set>

namespace kvasir::sim {

using namespace std::chrono_literals;
using dispatch::Verdict;
using dispatch::WorkerIndex;

namespace {

constexpr Nanos kTick = 20ms;
constexpr Nanos kPingInterval = 1s;
constexpr Nanos kPongMax = 2500ms;
constexpr Nanos kHandshakeMax = 5s;
constexpr Nanos kLocalPerExpert = 500us;

dispatch::Tuning tuning_of(const Client::Plan& plan) {
  dispatch::Tuning tuning;
  tuning.spot_check = plan.spot_check;
  tuning.lie_quarantine_max = plan.lie_quarantine_max;
  return tuning;
}

// Compares by value, and fails the run when an honest worker is accused.
class JudgedRows final : public dispatch::CheckedRows {
 public:
  JudgedRows(World& world, const std::vector<std::unique_ptr<Worker>>& workers, std::vector<std::uint64_t>& out,
             const std::vector<std::uint64_t>& opinions)
      : world_(world), workers_(workers), out_(out), opinions_(opinions) {}
  bool answer_agrees(std::uint32_t pair, std::uint32_t slot) const override { return out_[pair] == opinions_[slot]; }
  bool slots_agree(std::uint32_t a, std::uint32_t b) const override { return opinions_[a] == opinions_[b]; }
  void replace_answer(std::uint32_t pair, std::uint32_t slot) override { out_[pair] = opinions_[slot]; }
  void lie_found(const dispatch::Evidence& evidence) override {
    world_.trace("worker %u is caught lying", evidence.worker);
    if (workers_[evidence.worker]->lies_told == 0) world_.fail("an honest worker was blamed");
  }

 private:
  World& world_;
  const std::vector<std::unique_ptr<Worker>>& workers_;
  std::vector<std::uint64_t>& out_;
  const std::vector<std::uint64_t>& opinions_;
};

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

// --- a driver ----------------------------------------------------------------------------

void Client::begin_round(std::size_t d) {
  Driver& driver = *drivers_[d];
  if (driver.rounds_left == 0 || driver.in_round || down_) return;
  --driver.rounds_left;
  driver.in_round = true;
  ++rounds_;
  driver.layer = world_.rng.below(kLayers);
  const std::uint32_t n_rows = world_.chance(0.8) ? 1 + world_.rng.below(4) : 1 + world_.rng.below(40);
  driver.rows.clear();
  driver.rows_finite.clear();
  driver.pairs.clear();
  for (std::uint32_t row = 0; row < n_rows; ++row) {
    driver.rows.push_back(next_row_++);
    driver.rows_finite.push_back(!(plan_.input_has_nan && world_.chance(0.02)));
    std::set<std::uint32_t> experts;
    const std::uint32_t top_k = 1 + world_.rng.below(6);
    while (experts.size() < top_k) experts.insert(world_.rng.below(kExperts));
    for (std::uint32_t expert : experts) driver.pairs.push_back({row, expert});
  }
  driver.weights.clear();
  if (plan_.weighted)
    for (std::size_t i = 0; i < driver.pairs.size(); ++i) driver.weights.push_back(static_cast<float>(1 + world_.rng.below(7)));
  driver.out.assign(plan_.weighted ? n_rows : driver.pairs.size(), 0);
  driver.written.assign(driver.pairs.size(), 0);
  driver.started = driver.last_final = world_.now();
  driver.computed = Nanos(0);
  driver.local_before = driver.engine->counters().pairs_local;
  const Status begun = driver.engine->begin(fleet_,
                                            {.key = {layer_id(driver.layer)},
                                             .layer = driver.layer,
                                             .n_expert = kExperts,
                                             .n_rows = n_rows,
                                             .n_embd = kWidth,
                                             .row_type = plan_.weighted ? wire::RowType::kF16 : wire::RowType::kF32,
                                             .result_type = plan_.weighted ? wire::RowType::kF16 : wire::RowType::kF32,
                                             // Low, so that requests are cut; yet no expert of a 40-row round passes it (it
                                             // would be computed locally by right).
                                             .request_rows_max = 28,
                                             .request_pairs_max = 64,
                                             .pairs = driver.pairs,
                                             .weights = driver.weights,
                                             .hot = remote_demanded_ ? nullptr : plan_.hot},
                                            world_.now());
  if (!begun) return world_.fail("a sound round was refused: " + begun.error().message);
  carry_out(d);
  turn(d);
}

void Client::take(std::size_t d, Arrival arrival) {
  drivers_[d]->inbox.push_back(std::move(arrival));
  turn(d);
}

void Client::turn(std::size_t d) {
  Driver& driver = *drivers_[d];
  if (driver.computing) return;
  while (!driver.inbox.empty()) {
    const Arrival arrival = std::move(driver.inbox.front());
    driver.inbox.pop_front();
    const WorkerIndex w = arrival.worker;
    if (driver.links[w].connection != arrival.connection) continue;  // of a connection given up
    if (!arrival.message) {
      drop_link(d, w, 0ms);
      continue;
    }
    const Message& message = *arrival.message;
    if (message.kind == Message::Kind::kResult) {
      take_result(d, w, message);
    } else if (message.kind == Message::Kind::kError) {
      world_.trace("driver %zu: worker %u answers %llu with error %d", d, w, static_cast<unsigned long long>(message.id),
                   static_cast<int>(message.code));
      if (driver.engine->on_error(w, message.id, message.code, world_.now()) == Verdict::kInvalid) drop_link(d, w, 0ms);
    } else if (message.kind == Message::Kind::kDrain) {
      fleet_.on_draining(w);
    }
  }
  if (!driver.in_round) return;
  if (driver.engine->has_checks_to_judge()) judge(driver);
  if (driver.engine->needs_advance(world_.now()) && canary_ != Canary::kNoDeadline) {
    driver.engine->advance(fleet_, world_.now());
    carry_out(d);
  }
  if (driver.engine->finished()) return end_round(d);
  if (driver.engine->has_local()) return compute_locally(d);
  if (driver.engine->has_local_check()) return compute_check(d);
  const TimePoint wake = driver.engine->next_wake();
  if (wake == TimePoint::max()) {
    if (!driver.engine->needs_advance(world_.now())) world_.fail("a round waits for nothing");
    return world_.after(Nanos(1), [this, d] { turn(d); });
  }
  driver.wake_at = wake;
  world_.at(wake, [this, d, wake] {
    if (drivers_[d]->in_round && drivers_[d]->wake_at == wake) turn(d);
  });
}

void Client::take_result(std::size_t d, WorkerIndex w, const Message& message) {
  Driver& driver = *drivers_[d];
  if (message.damaged) {  // the frame reader's checksum
    driver.engine->on_invalid(w);
    return drop_link(d, w, 0ms);
  }
  const Verdict verdict = driver.engine->on_result(
      w, message.id, message.head, message.more, world_.now(), [&](std::uint32_t i, std::uint32_t at) {
        const bool honest = driver.rows_finite[plan_.weighted ? at : driver.pairs[at].row];
        const RowState state = honest ? message.states[i] : RowState::kNan;
        if (state == RowState::kFinite) add_answer(driver, at, message.answers[i]);
        return state;
      },
      [&](std::uint32_t i, std::uint32_t slot) {
        driver.opinions.resize(driver.engine->check_slots());
        driver.opinions[slot] = message.answers[i];
        return message.states[i];
      });
  if (verdict == Verdict::kLate && canary_ == Canary::kLateRowTaken && driver.in_round && !message.answers.empty())
    driver.out[0] = message.answers[0];
  if (verdict == Verdict::kInvalid) drop_link(d, w, 0ms);
}

void Client::carry_out(std::size_t d) {
  Driver& driver = *drivers_[d];
  dispatch::RoundEngine& engine = *driver.engine;
  std::set<std::pair<std::uint64_t, std::uint32_t>> seen;
  for (std::uint32_t i : engine.to_send) {
    const dispatch::Request& request = engine.request(i);
    if (request.final_at - request.sent_at > tuning_.deadline_ceiling) world_.fail("a deadline is past the ceiling");
    driver.last_final = std::max(driver.last_final, request.final_at);
    Message message{.kind = Message::Kind::kExec, .id = request.id, .layer = driver.layer};
    for (std::uint32_t row : request.rows) message.rows.push_back(driver.rows[row]);
    message.pairs = request.wire_pairs;
    message.result_type = request.result_type;
    for (float weight : request.weights) message.weights.push_back(static_cast<std::uint64_t>(weight));
    check_request(driver, request);
    world_.trace("driver %zu sends %s %llu (%zu pairs) to worker %u", d, request.is_hedge ? "hedge" : "request",
                 static_cast<unsigned long long>(request.id), request.pairs.size(), request.worker);
    if (canary_ == Canary::kLeak) fleet_.on_sent(request.worker, world_.chance(0.01) ? 1 : 0);
    if (driver.links[request.worker].connection) driver.links[request.worker].connection->send(std::move(message));
  }
  engine.to_send.clear();
  for (const auto& cancel : engine.to_cancel)
    if (driver.links[cancel.worker].connection)
      driver.links[cancel.worker].connection->send({.kind = Message::Kind::kCancel, .id = cancel.id});
  engine.to_cancel.clear();
  const std::vector<WorkerIndex> stalled = std::move(engine.to_drop);
  engine.to_drop.clear();
  for (WorkerIndex w : stalled) drop_link(d, w, fleet_.on_link_stalled(w));
  const std::vector<WorkerIndex> quarantined = std::move(engine.quarantined);
  engine.quarantined.clear();
  for (WorkerIndex w : quarantined) {
    world_.trace("worker %u is quarantined", w);
    drop_link(d, w, 0ms);
  }
}

void Client::compute_locally(std::size_t d) {
  Driver& driver = *drivers_[d];
  const std::span<const std::uint32_t> batch = driver.engine->take_local(driver.engine->awaits_remote());
  if (batch.empty()) return world_.after(Nanos(0), [this, d] { turn(d); });
  if (!plan_.local_allowed) return world_.fail("local compute where none is allowed");
  std::set<std::uint32_t> experts;
  for (std::uint32_t pair : batch) {
    experts.insert(driver.pairs[pair].expert);
    const std::uint32_t row = driver.pairs[pair].row;
    const std::uint64_t value = oracle(driver.layer, driver.rows[row], driver.pairs[pair].expert);
    if (plan_.weighted) driver.out[row] += static_cast<std::uint64_t>(driver.weights[pair]) * value;
    else driver.out[pair] = value;
    driver.written[pair] = 1;
  }
  const Nanos takes = kLocalPerExpert * static_cast<std::int64_t>(experts.size());
  driver.computing = true;
  driver.computed += takes;
  world_.after(takes, [this, d, takes] {
    Driver& self = *drivers_[d];
    self.computing = false;
    self.engine->local_done(takes, [&](std::uint32_t pair) { return self.rows_finite[self.pairs[pair].row]; });
    turn(d);
  });
}

void Client::compute_check(std::size_t d) {
  Driver& driver = *drivers_[d];
  std::uint32_t slot = 0;
  const std::span<const std::uint32_t> batch = driver.engine->take_local_check(slot);
  if (batch.empty()) return world_.after(Nanos(0), [this, d] { turn(d); });
  if (!plan_.local_allowed) return world_.fail("a local check where no local compute is allowed");
  driver.opinions.resize(driver.engine->check_slots());
  for (std::uint32_t pair : batch)
    driver.opinions[slot++] = oracle(driver.layer, driver.rows[driver.pairs[pair].row], driver.pairs[pair].expert);
  driver.computing = true;
  driver.computed += kLocalPerExpert;
  world_.after(kLocalPerExpert, [this, d] {
    drivers_[d]->computing = false;
    drivers_[d]->engine->check_computed(kLocalPerExpert);
    turn(d);
  });
}

void Client::judge(Driver& driver) {
  JudgedRows rows(world_, workers_, driver.out, driver.opinions);
  driver.engine->judge_checks(rows);
}

void Client::end_round(std::size_t d) {
  Driver& driver = *drivers_[d];
  driver.in_round = false;
  const Status status = driver.engine->end(fleet_, world_.now());
  carry_out(d);
  check_round(driver, status);
  world_.after(world_.chance(0.1) ? world_.between(0ms, 2s) : world_.between(0ms, 5ms), [this, d] { begin_round(d); });
}

void Client::check_round(Driver& driver, const Status& status) {
  // Every request is waited for until its second deadline at most, and a lost expert
  // (without local compute) for the wait allowed; all else is compute of our own.
  const Nanos slack = 50ms + tuning_.no_replica_retry;
  Nanos limit = driver.last_final - driver.started + driver.computed + slack;
  if (!plan_.local_allowed) limit += tuning_.no_replica_wait;
  const Nanos took = world_.now() - driver.started;
  if (took > limit)
    world_.fail("a round took " + std::to_string(took.count() / 1000) + " us, allowed were " + std::to_string(limit.count() / 1000));
  if (!status) {
    ++failed_rounds_;
    world_.trace("round fails: %s", status.error().message.c_str());
    if (plan_.local_allowed) world_.fail("a round failed although local compute is allowed: " + status.error().message);
    if (!status.error().message.contains("layer " + std::to_string(driver.layer)) || !status.error().message.contains("expert"))
      world_.fail("an error that does not name layer and experts: " + status.error().message);
    if (remote_demanded_) world_.fail("a round failed though every worker is well: " + status.error().message);
    return;
  }
  check_values(driver);
  if (remote_demanded_ && driver.engine->counters().pairs_local != driver.local_before)
    world_.fail("pairs were computed locally though every worker is well");
}

void Client::add_answer(Driver& driver, std::uint32_t at, std::uint64_t answer) {
  const bool changed = canary_ == Canary::kWrongRow && world_.chance(0.01);
  const bool twice = canary_ == Canary::kSumTwice && world_.chance(0.01);
  if (plan_.weighted) {
    driver.out[at] += (answer ^ (changed ? 1u : 0u)) * (twice ? 2 : 1);
  } else {
    driver.out[at] = answer ^ (changed ? 1u : 0u);
    ++driver.written[at];
  }
}

void Client::check_request(const Driver& driver, const dispatch::Request& request) {
  if (plan_.weighted && request.weights.size() != request.pairs.size()) return world_.fail("a pair travels without its weight");
  for (std::size_t i = 0; i < request.wire_pairs.size(); ++i) {
    const std::uint32_t expert = request.wire_pairs[i].expert;
    const auto in_request = std::ranges::count(request.wire_pairs, expert, &wire::Pair::expert);
    const auto in_round = std::ranges::count(driver.pairs, expert, &wire::Pair::expert);
    // Per pair, all rows of an expert share a request; sums are asked of what is missing.
    if (!plan_.weighted && in_request != in_round) world_.fail("an expert's pairs were split over requests");
    if (plan_.weighted && request.weights[i] != driver.weights[request.pairs[i]]) world_.fail("a pair travels with another's weight");
  }
}

void Client::check_values(const Driver& driver) {
  std::vector<std::uint64_t> sums(driver.rows.size(), 0);
  for (std::size_t i = 0; i < driver.pairs.size(); ++i) {
    const wire::Pair pair = driver.pairs[i];
    const std::uint64_t value = oracle(driver.layer, driver.rows[pair.row], pair.expert);
    if (plan_.weighted) {
      sums[pair.row] += static_cast<std::uint64_t>(driver.weights[i]) * value;
      continue;
    }
    if (driver.written[i] != 1) return world_.fail("a pair was answered " + std::to_string(driver.written[i]) + " times");
    if (driver.out[i] == value) continue;
    ++wrong_answers_;
    // Unchecked, or with nobody to judge between two, a lie passes.
    const bool may_be_fooled = std::ranges::any_of(workers_, [](const auto& worker) { return worker->lies_told > 0; }) &&
                               (plan_.spot_check < 1 || !plan_.local_allowed);
    if (!may_be_fooled) return world_.fail("a pair has another answer than the oracle's");
  }
  if (plan_.weighted && driver.out != sums) world_.fail("a row's sum is not the oracle's: a pair counts twice, or not at all");
}

}  // namespace kvasir::sim
