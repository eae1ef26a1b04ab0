// Client, second part: a driver and its rounds.
#include "sim/client.h"

#include <algorithm>
#include <set>

namespace kvasir::sim {

using namespace std::chrono_literals;
using dispatch::Verdict;
using dispatch::WorkerIndex;

namespace {

constexpr Nanos kLocalPerExpert = 500us;

}  // namespace

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
    if (!request.is_trial) driver.last_final = std::max(driver.last_final, request.final_at);
    Message message{.kind = Message::Kind::kExec, .id = request.id, .layer = driver.layer};
    for (std::uint32_t row : request.rows) message.rows.push_back(driver.rows[row]);
    message.pairs = request.wire_pairs;
    message.result_type = request.result_type;
    for (float weight : request.weights) message.weights.push_back(static_cast<std::uint64_t>(weight));
    check_request(driver, request);
    world_.trace("driver %zu sends %s %llu (%zu pairs) to worker %u", d, request.is_hedge ? "hedge" : request.is_trial ? "trial" : "request",
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

void Client::end_round(std::size_t d) {
  Driver& driver = *drivers_[d];
  driver.in_round = false;
  const Status status = driver.engine->end(fleet_, world_.now());
  carry_out(d);
  check_round(driver, status);
  world_.after(world_.chance(0.1) ? world_.between(0ms, 2s) : world_.between(0ms, 5ms), [this, d] { begin_round(d); });
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

}  // namespace kvasir::sim
