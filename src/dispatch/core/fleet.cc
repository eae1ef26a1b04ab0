#include "dispatch/core/fleet.h"

#include <algorithm>

namespace kvasir::dispatch {
namespace {

constexpr std::uint32_t kBackoffDoublingsMax = 16;
constexpr std::size_t kRefusedLayersMax = 4096;

Nanos scaled(Nanos base, double factor, Nanos ceiling) {
  const double ns = static_cast<double>(base.count()) * factor;
  return ns >= static_cast<double>(ceiling.count()) ? ceiling : Nanos(static_cast<std::int64_t>(ns));
}

}  // namespace

std::string_view to_string(WorkerState state) {
  switch (state) {
    case WorkerState::kConnecting: return "connecting";
    case WorkerState::kUp: return "up";
    case WorkerState::kQuarantined: return "quarantined";
    case WorkerState::kDraining: return "draining";
    case WorkerState::kDown: return "down";
    case WorkerState::kRemoved: return "removed";
  }
  return "unknown";
}

Fleet::Fleet(std::size_t n_workers, const Tuning& tuning, std::uint64_t seed)
    : tuning_(tuning), rng_(seed), workers_(n_workers), hedge_tokens_(tuning.hedge_burst) {
  rebuild_routes();
}

void Fleet::rebuild_routes() {
  std::vector<std::shared_ptr<const wire::Holdings>> holdings;
  holdings.reserve(workers_.size());
  for (const Worker& worker : workers_) holdings.push_back(worker.holdings);
  routes_ = std::make_shared<const RouteTable>(holdings);
}

// --- the table ---------------------------------------------------------------------------

WorkerIndex Fleet::add(std::optional<WorkerIndex> before) {
  Worker fresh;
  if (before) {
    // Moving house is no pardon either.
    const Worker& same = workers_[*before];
    fresh.quarantine = same.quarantine;
    fresh.quarantine_until = same.quarantine_until;
    fresh.probation = same.probation;
    fresh.caught = same.caught;
    fresh.reputation = same.reputation;
    if (same.probation > 0) fresh.state = WorkerState::kQuarantined;  // usable() looks whether it is over
  }
  if (free_.empty()) {
    workers_.push_back(std::move(fresh));
    return static_cast<WorkerIndex>(workers_.size() - 1);
  }
  // The lowest: what drivers go through in every round stays short.
  const auto lowest = std::ranges::min_element(free_);
  const WorkerIndex w = *lowest;
  free_.erase(lowest);
  workers_[w] = std::move(fresh);
  return w;
}

void Fleet::remove(WorkerIndex w) {
  Worker& worker = workers_[w];
  worker.state = WorkerState::kRemoved;
  worker.control_up = false;
  if (std::exchange(worker.holdings, nullptr)) rebuild_routes();
}

void Fleet::release(WorkerIndex w) { free_.push_back(w); }

// --- control -----------------------------------------------------------------------------

std::optional<TimePoint> Fleet::next_attempt(WorkerIndex w) const {
  const Worker& worker = workers_[w];
  if (worker.control_up || worker.state == WorkerState::kConnecting || worker.state == WorkerState::kRemoved)
    return std::nullopt;
  return worker.next_attempt;
}

void Fleet::on_connecting(WorkerIndex w) {
  Worker& worker = workers_[w];
  if (worker.state != WorkerState::kQuarantined) worker.state = WorkerState::kConnecting;
}

void Fleet::on_connected(WorkerIndex w, Nanos round_trip) {
  Worker& worker = workers_[w];
  worker.control_up = true;
  worker.refused = false;
  worker.failures = 0;
  worker.refused_layers.clear();
  worker.queue_wait = Nanos(0);
  // A restart is no pardon: quarantine outlasts it.
  if (worker.state != WorkerState::kQuarantined) worker.state = WorkerState::kUp;
  if (worker.latency.samples() == 0) worker.latency.set_prior(round_trip, std::chrono::milliseconds(1));
}

Nanos Fleet::jittered(Nanos base) {
  // Half to all of it: workers that fell together do not come back together.
  return scaled(base, 0.5 + 0.5 * rng_.unit(), base);
}

void Fleet::on_lost(WorkerIndex w, TimePoint now) {
  Worker& worker = workers_[w];
  const double doubled = static_cast<double>(1u << std::min(worker.failures, kBackoffDoublingsMax));
  worker.next_attempt = now + jittered(scaled(tuning_.backoff_first, doubled, tuning_.backoff_max));
  ++worker.failures;
  worker.control_up = false;
  if (worker.state != WorkerState::kQuarantined) worker.state = WorkerState::kDown;
  if (worker.holdings) {
    worker.holdings = nullptr;
    rebuild_routes();
  }
}

void Fleet::on_refused(WorkerIndex w, TimePoint now) {
  on_lost(w, now);
  workers_[w].refused = true;
  workers_[w].next_attempt = now + jittered(tuning_.refused_backoff);
}

void Fleet::on_holdings(WorkerIndex w, wire::Holdings holdings) {
  workers_[w].holdings = std::make_shared<const wire::Holdings>(std::move(holdings));
  workers_[w].refused_layers.clear();
  rebuild_routes();
}

void Fleet::on_pong(WorkerIndex w, const wire::Pong& pong, Nanos round_trip, TimePoint now) {
  Worker& worker = workers_[w];
  worker.tally.round_trip = round_trip;
  if (worker.latency.samples() == 0)
    worker.latency.set_prior(round_trip, pong.row_us > 0 ? Nanos(std::chrono::microseconds(pong.row_us))
                                                          : Nanos(std::chrono::milliseconds(1)));
  // As the worker predicts it; where it has measured nothing, each waiting request is taken for one
  // like our own smallest. A claim that is far off costs the worker traffic or the round one hedge,
  // never correctness.
  const std::int64_t queued = std::min<std::uint32_t>(pong.queued, 1024);
  const Nanos wait = pong.wait_us > 0 ? Nanos(std::chrono::microseconds(pong.wait_us)) : worker.latency.predict(1).expected * queued;
  worker.queue_wait = std::min(queued > 0 ? wait : Nanos(0), tuning_.deadline_ceiling);
  worker.queue_seen = now;
}

void Fleet::on_draining(WorkerIndex w) {
  Worker& worker = workers_[w];
  if (worker.state == WorkerState::kUp) worker.state = WorkerState::kDraining;
}

Nanos Fleet::on_link_stalled(WorkerIndex w) {
  Worker& worker = workers_[w];
  const double doubled = static_cast<double>(1u << std::min(worker.stalls, kBackoffDoublingsMax));
  ++worker.stalls;
  return jittered(scaled(tuning_.backoff_first, 8 * doubled, 15 * tuning_.backoff_max));
}

// --- drivers -----------------------------------------------------------------------------

void Fleet::on_sent(WorkerIndex w, std::uint32_t pairs) { workers_[w].outstanding_pairs += pairs; }

bool Fleet::draw_check(WorkerIndex w, std::uint32_t pairs) {
  Reputation& reputation = workers_[w].reputation;
  const double share = check_share(reputation, tuning_);
  reputation.pairs_asked += pairs;
  reputation.asked_in_standing += pairs;
  return share > 0 && rng_.unit() < share;
}

void Fleet::quarantine(Worker& worker, TimePoint now) {
  worker.quarantine = worker.quarantine == Nanos(0) ? tuning_.quarantine_first
                                                    : std::min(2 * worker.quarantine, tuning_.quarantine_max);
  quarantine_until(worker, now + jittered(worker.quarantine));
}

void Fleet::quarantine_until(Worker& worker, TimePoint until) {
  // A fault does not shorten what a lie earned.
  const bool longer = worker.state != WorkerState::kQuarantined || until > worker.quarantine_until;
  if (longer) worker.quarantine_until = until;
  if (worker.state != WorkerState::kRemoved) worker.state = WorkerState::kQuarantined;
  worker.probation = tuning_.probation_answers;
  worker.internal_errors = 0;
}

bool Fleet::apply(const Report& report, TimePoint now) {
  Worker& worker = workers_[report.worker];
  const auto settle = [&] { worker.outstanding_pairs -= std::min(worker.outstanding_pairs, report.pairs); };
  const bool was_quarantined = worker.state == WorkerState::kQuarantined;
  if (report.rows > 0) {
    worker.service.rows += report.rows;
    worker.service.pairs += report.pairs;
  }
  switch (report.kind) {
    case Report::Kind::kAnswer:
      settle();
      worker.latency.observe(report.pairs, report.latency);
      worker.renewed = now;
      worker.trial_wait = Nanos(0);
      ++worker.tally.answers;
      worker.tally.pairs += report.pairs;
      worker.tally.time += report.latency;
      worker.stalls = 0;
      worker.internal_errors = 0;
      if (worker.probation > 0 && !was_quarantined && --worker.probation == 0) worker.quarantine = Nanos(0);
      break;
    case Report::Kind::kTrial:
      settle();
      if (worker.latency.improve(report.pairs, report.latency)) worker.trial_wait = tuning_.trial_again;
      break;
    case Report::Kind::kForgotten: settle(); break;
    case Report::Kind::kInvalid: quarantine(worker, now); break;
    case Report::Kind::kInternalError:
      if (++worker.internal_errors >= tuning_.internal_errors_max) quarantine(worker, now);
      break;
    case Report::Kind::kVerified: worker.reputation.pairs_verified += report.pairs; break;
    case Report::Kind::kLied:
      worker.reputation.pairs_wrong += report.pairs;
      // It is asked nothing now, so this is about an answer from before: part of one offence.
      if (was_quarantined && worker.caught) break;
      worker.caught = true;
      worker.reputation.asked_in_standing = 0;
      ++worker.reputation.offences;
      quarantine_until(worker, now + lie_quarantine(worker.reputation, tuning_));
      worker.probation = tuning_.probation_answers;
      break;
    case Report::Kind::kDraining: on_draining(report.worker); break;
    case Report::Kind::kLayerRefused:
      if (!refuses_layer(report.worker, report.layer) && worker.refused_layers.size() < kRefusedLayersMax)
        worker.refused_layers.push_back(report.layer);
      break;
  }
  return !was_quarantined && worker.state == WorkerState::kQuarantined;
}

// --- questions ---------------------------------------------------------------------------

std::size_t Fleet::count_up() const {
  return static_cast<std::size_t>(
      std::ranges::count_if(workers_, [](const Worker& worker) { return worker.state == WorkerState::kUp; }));
}

Usable Fleet::usable(WorkerIndex w, TimePoint now) {
  Worker& worker = workers_[w];
  if (worker.state == WorkerState::kQuarantined && now >= worker.quarantine_until) {
    worker.state = worker.control_up ? WorkerState::kUp : WorkerState::kDown;
    worker.caught = false;
  }
  if (worker.state != WorkerState::kUp) return Usable::kNo;
  if (worker.probation > 0 && rng_.below(tuning_.probation_one_in) != 0) return Usable::kAvoid;
  return Usable::kYes;
}

bool Fleet::refuses_layer(WorkerIndex w, const LayerKey& key) const {
  return std::ranges::find(workers_[w].refused_layers, key) != workers_[w].refused_layers.end();
}

Nanos Fleet::queue_wait(const Worker& worker, TimePoint now) const {
  return now - worker.queue_seen <= tuning_.load_fresh ? worker.queue_wait : Nanos(0);
}

bool Fleet::begin_trial(WorkerIndex w, TimePoint now) {
  Worker& worker = workers_[w];
  const Nanos wait = worker.trial_wait == Nanos(0) ? tuning_.trial_after : worker.trial_wait;
  if (worker.latency.samples() == 0 || now < worker.renewed + wait) return false;
  worker.renewed = now;
  // Until its answer says better.
  worker.trial_wait = std::min(2 * std::max(wait, tuning_.trial_after), tuning_.trial_max);
  return true;
}

bool Fleet::is_busy(WorkerIndex w, std::uint32_t pairs, TimePoint now) const {
  const Worker& worker = workers_[w];
  const Nanos wait = queue_wait(worker, now);
  return wait > Nanos(0) && wait >= worker.latency.predict(pairs).expected;
}

Nanos Fleet::predicted_finish(WorkerIndex w, std::uint32_t pairs, TimePoint now) const {
  const Worker& worker = workers_[w];
  return worker.latency.predict(worker.outstanding_pairs + pairs).expected + queue_wait(worker, now);
}

Nanos Fleet::earliest_finish(WorkerIndex w, std::uint32_t pairs, TimePoint now) const {
  const Worker& worker = workers_[w];
  return worker.latency.at_least(worker.outstanding_pairs + pairs) + queue_wait(worker, now);
}

Fleet::Deadlines Fleet::deadlines(WorkerIndex w, std::uint32_t pairs, TimePoint now) const {
  const Worker& worker = workers_[w];
  const std::uint32_t ahead = worker.outstanding_pairs + pairs;
  const LatencyModel::Prediction prediction = worker.latency.predict(ahead);
  const Nanos ceiling = tuning_.deadline_ceiling;
  Deadlines out{.expected = prediction.expected, .hedge = ceiling, .final = ceiling, .measured = prediction.measured};
  if (prediction.measured) {
    const LatencyModel& model = worker.latency;
    out.hedge = scaled(prediction.expected, model.ratio_quantile(tuning_.hedge_quantile) * tuning_.hedge_margin, ceiling);
    out.final = scaled(prediction.expected, model.ratio_quantile(tuning_.final_quantile) * tuning_.final_margin, ceiling);
  } else {
    const Nanos guess = tuning_.unmeasured_fixed + tuning_.unmeasured_per_pair * static_cast<std::int64_t>(ahead);
    out.final = std::max(guess, prediction.expected);
    out.hedge = out.final / 4;
  }
  const Nanos wait = queue_wait(worker, now);
  out.hedge = std::clamp(out.hedge + wait, tuning_.hedge_floor, ceiling);
  out.final = std::clamp(std::max(out.final + wait, 2 * out.hedge), tuning_.final_floor, ceiling);
  return out;
}

void Fleet::earn_hedge() {
  hedge_tokens_ = std::min(hedge_tokens_ + tuning_.hedge_earned_per_request, tuning_.hedge_burst);
}

bool Fleet::spend_hedge() {
  if (hedge_tokens_ < 1) return false;
  hedge_tokens_ -= 1;
  return true;
}

}  // namespace kvasir::dispatch
