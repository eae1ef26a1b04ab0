#include "dispatch/core/round_engine.h"

#include <algorithm>

#include "base/expert_set.h"

namespace kvasir::dispatch {

RoundEngine::RoundEngine(std::size_t n_workers, bool local_allowed, const Tuning& tuning)
    : tuning_(tuning), local_allowed_(local_allowed) {
  grow(n_workers);
}

void RoundEngine::grow(std::size_t n_workers) {
  if (n_workers <= links_.size()) return;
  links_.resize(n_workers);
  by_worker_.resize(n_workers);
  pairs_on_worker_.resize(n_workers, 0);
}

// --- links -------------------------------------------------------------------------------

void RoundEngine::link_up(WorkerIndex w) {
  grow(w + 1);
  link_down(w);
  links_[w].ready = true;
  if (n_parked_ > 0) retry_at_ = TimePoint{};  // at once
}

void RoundEngine::link_down(WorkerIndex w) {
  if (w >= links_.size()) return;
  Link& link = links_[w];
  for (std::size_t i = 0; i < n_requests_; ++i) {
    Request& request = requests_[i];
    if (request.worker != w || !request.open) continue;
    request.open = false;
    stop_waiting(request);
    reports_.push_back({.kind = Report::Kind::kForgotten, .worker = w, .pairs = static_cast<std::uint32_t>(request.pairs.size())});
  }
  for (const Unanswered& old : link.unanswered)
    reports_.push_back({.kind = Report::Kind::kForgotten, .worker = w, .pairs = old.pairs});
  link = Link{};
}

std::size_t RoundEngine::outstanding() const {
  std::size_t sum = 0;
  for (std::size_t i = 0; i < n_requests_; ++i) sum += requests_[i].open;
  for (const Link& link : links_) sum += link.unanswered.size();
  return sum;
}

// --- answers -----------------------------------------------------------------------------

Request* RoundEngine::find_open(WorkerIndex w, std::uint64_t id) {
  for (std::size_t i = 0; i < n_requests_; ++i)
    if (requests_[i].id == id && requests_[i].worker == w && requests_[i].open) return &requests_[i];
  return nullptr;
}

void RoundEngine::answer_came(WorkerIndex w) {
  Link& link = links_[w];
  link.suspect = false;
  link.stalled = false;
}

// An answer to a request of an earlier round: dropped, but its time is worth knowing, or the
// measured distribution would hold the fast answers only. (Between rounds nobody reads, so
// what is found then may have lain there for long.)
bool RoundEngine::take_unanswered(WorkerIndex w, std::uint64_t id, bool complete, bool refused, TimePoint now) {
  auto& unanswered = links_[w].unanswered;
  const auto it = std::ranges::find(unanswered, id, &Unanswered::id);
  if (it == unanswered.end()) return false;
  if (!complete) return true;
  ++counters_.late_answers;
  answer_came(w);
  using Kind = Report::Kind;
  const bool timed = it->timed && !input_.pairs.empty();
  reports_.push_back({.kind = refused ? Kind::kForgotten : it->is_trial ? Kind::kTrial : timed ? Kind::kAnswer : Kind::kForgotten,
                      .worker = w,
                      .pairs = it->pairs,
                      .latency = now - it->sent_at});
  unanswered.erase(it);
  return true;
}

Verdict RoundEngine::check_result(WorkerIndex w, std::uint64_t id, const wire::ResultHead& head, bool more,
                                  TimePoint now, Request*& request) {
  request = find_open(w, id);
  if (request == nullptr) {
    if (take_unanswered(w, id, !more, false, now)) return Verdict::kLate;
    ++counters_.unknown_answers;
    return Verdict::kUnknown;
  }
  // Frames of one answer come in order and without gaps, and `more` says the truth.
  const std::uint32_t total = request->answer_rows();
  const bool fits = head.n_embd == input_.n_embd && head.row_type == request->result_type && head.total_rows == total &&
                    head.first_row == request->received && head.n_rows > 0 && head.n_rows <= total - request->received &&
                    more == (request->received + head.n_rows < total);
  if (fits) return Verdict::kTaken;
  on_invalid(w);
  return Verdict::kInvalid;
}

void RoundEngine::result_taken(Request& request, const wire::ResultHead& head, TimePoint now) {
  request.received += head.n_rows;
  if (request.received < request.answer_rows()) return;
  answer_came(request.worker);
  request.open = false;
  using Kind = Report::Kind;
  if (request.timed && !request.is_trial && request.expected > Nanos(0))
    timings.push_back({request.worker, request.result_type,
                       static_cast<double>((now - request.sent_at).count()) / static_cast<double>(request.expected.count())});
  if (request.check != Request::kNoCheck) opinion_given(request.check);
  else if (!request.is_trial) last_answer_ = now;
  stop_waiting(request);
  reports_.push_back({.kind = request.is_trial ? Kind::kTrial : request.timed ? Kind::kAnswer : Kind::kForgotten,
                      .worker = request.worker,
                      .pairs = static_cast<std::uint32_t>(request.pairs.size()),
                      .rows = static_cast<std::uint32_t>(request.rows.size()),
                      .latency = now - request.sent_at});
}

// Whether the sum in an answer's row can be counted.
bool RoundEngine::sum_wanted(const Request& request, std::uint32_t wire_row) {
  const std::span<const std::uint32_t> pairs = request.pairs_of(wire_row);
  const auto counted = std::ranges::count_if(pairs, [&](std::uint32_t pair) { return answered_[pair] != 0; });
  if (counted == 0) return true;
  if (counted == std::ssize(pairs)) return false;
  ++counters_.sums_dropped;
  // No fault of the worker's: it may be asked again for the rest.
  for (std::uint32_t pair : pairs) {
    Group& group = groups_[pair_group_[pair]];
    const auto end = group.tried.begin() + group.n_tried;
    group.n_tried -= static_cast<std::uint8_t>(end - std::remove(group.tried.begin(), end, request.worker));
  }
  return false;
}

void RoundEngine::pair_came(const Request& request, std::uint32_t pair, RowState state) {
  Group& group = groups_[pair_group_[pair]];
  if (state == RowState::kFinite) {
    answered_[pair] = 1;
    answered_by_[pair] = request.worker;
    --remaining_;
    --group.missing;
    ++counters_.pairs_remote;
    if (input_.weighted()) return;
    for (const Doubt& doubt : doubts_)
      if (doubt.pair == pair && doubt.worker != request.worker) blame(doubt.worker);
    return;
  }
  const wire::RowType type = request.result_type;
  const bool narrow = type != wire::RowType::kF32;
  // Rounding to a narrower type can make an infinity, and in q8 a NaN, of an honest value.
  const bool may_be_honest = narrow && (state == RowState::kInfinite || type == wire::RowType::kQ8);
  if (!may_be_honest) doubts_.push_back({pair, request.worker});
  if (!narrow) {
    group.not_finite = true;
  } else if (!group.wide) {
    group.wide = true;
    group.n_tried = 0;
  }
}

// A finite round: whoever sent a sum that was not is wrong, unless its row's honest sum is not either.
void RoundEngine::judge_sums() {
  if (!input_.weighted() || remaining_ > 0) return;
  for (const Doubt& doubt : doubts_) {
    const auto excuses = [&](const Doubt& other) { return other.excused && input_.pairs[other.pair].row == input_.pairs[doubt.pair].row; };
    if (std::ranges::none_of(doubts_, excuses)) blame(doubt.worker);
  }
}

void RoundEngine::blame(WorkerIndex w) {
  for (const Report& report : reports_)
    if (report.kind == Report::Kind::kInvalid && report.worker == w) return;
  ++counters_.invalid_answers;
  reports_.push_back({.kind = Report::Kind::kInvalid, .worker = w});
}

void RoundEngine::on_invalid(WorkerIndex w) { blame(w); }

Verdict RoundEngine::on_error(WorkerIndex w, std::uint64_t id, wire::ErrorCode code, TimePoint now) {
  using wire::ErrorCode;
  Request* request = find_open(w, id);
  if (request == nullptr) {
    if (take_unanswered(w, id, true, true, now)) return Verdict::kLate;
    ++counters_.unknown_answers;
    return code == ErrorCode::kMalformed ? Verdict::kInvalid : Verdict::kUnknown;
  }
  answer_came(w);
  request->open = false;
  stop_waiting(*request);
  reports_.push_back({.kind = Report::Kind::kForgotten, .worker = w, .pairs = static_cast<std::uint32_t>(request->pairs.size())});
  switch (code) {
    case ErrorCode::kBusy: ++counters_.busy; return Verdict::kTaken;
    case ErrorCode::kCancelled: return Verdict::kTaken;
    case ErrorCode::kDraining: reports_.push_back({.kind = Report::Kind::kDraining, .worker = w}); return Verdict::kTaken;
    case ErrorCode::kUnknownLayer:
    case ErrorCode::kUnsupportedRecipe:
    case ErrorCode::kExpertNotHeld:
      reports_.push_back({.kind = Report::Kind::kLayerRefused, .worker = w, .layer = input_.key});
      return Verdict::kTaken;
    case ErrorCode::kUnknownRecipe:
    case ErrorCode::kMalformed:
    case ErrorCode::kWrongVersion:
    case ErrorCode::kUnauthorized: return Verdict::kInvalid;
    case ErrorCode::kUnknown:
    case ErrorCode::kNumerics:
    case ErrorCode::kNoRoom:
    case ErrorCode::kBadUpload:
    case ErrorCode::kInternal: break;
  }
  reports_.push_back({.kind = Report::Kind::kInternalError, .worker = w});
  return Verdict::kTaken;
}

void RoundEngine::stop_waiting(Request& request) {
  if (!request.waited_for) return;
  request.waited_for = false;
  if (request.check != Request::kNoCheck) opinion_failed(request.check);
  for (std::uint32_t g : request.groups) {
    Group& group = groups_[g];
    if (--group.in_flight == 0 && group.missing > 0) unplaced_.push_back(g);
  }
}

// --- time --------------------------------------------------------------------------------

TimePoint RoundEngine::next_wake() const {
  TimePoint wake = TimePoint::max();
  for (std::size_t i = 0; i < n_requests_; ++i) {
    const Request& request = requests_[i];
    if (!request.waited_for) continue;
    wake = std::min(wake, request.hedge_done ? request.final_at : std::min(request.hedge_at, request.final_at));
  }
  if (n_parked_ > 0) wake = std::min(wake, retry_at_);
  return wake;
}

bool RoundEngine::needs_advance(TimePoint now) const {
  return !finished() &&
         (!unplaced_.empty() || !reports_.empty() || !asking_checks_.empty() || now >= next_wake());
}

bool RoundEngine::awaits_remote() const {
  for (std::size_t i = 0; i < n_requests_; ++i)
    if (requests_[i].waited_for) return true;
  return false;
}

void RoundEngine::flush_reports(Fleet& fleet, TimePoint now) {
  for (const Report& report : reports_)
    if (fleet.apply(report, now)) quarantined.push_back(report.worker);
  reports_.clear();
}

void RoundEngine::advance(Fleet& fleet, TimePoint now) {
  if (finished()) return;
  flush_reports(fleet, now);
  check_deadlines(fleet, now);
  if (!unplaced_.empty()) {
    placing_.clear();
    std::swap(placing_, unplaced_);
    counters_.redispatched += placing_.size();
    place(fleet, placing_, false, now);
  }
  if (n_parked_ > 0 && now >= retry_at_) retry_parked(fleet, now);
  ask_opinions(fleet, now);
}

void RoundEngine::check_deadlines(Fleet& fleet, TimePoint now) {
  // By position: hedging adds requests.
  for (std::size_t i = 0; i < n_requests_; ++i) {
    if (!requests_[i].waited_for) continue;
    if (now >= requests_[i].final_at) {
      // Answers are still taken, but nobody counts on them.
      links_[requests_[i].worker].stalled = true;
      stop_waiting(requests_[i]);
    } else if (!requests_[i].hedge_done && now >= requests_[i].hedge_at) {
      links_[requests_[i].worker].suspect = true;
      if (requests_[i].check == Request::kNoCheck) hedge(fleet, requests_[i], now);
      else stop_waiting(requests_[i]);
    }
  }
}

void RoundEngine::retry_parked(Fleet& fleet, TimePoint now) {
  retry_at_ = now + tuning_.no_replica_retry;
  ExpertSet lost;
  std::vector<std::uint32_t> again;
  for (std::uint32_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    if (!group.parked) continue;
    if (group.missing == 0) {
      group.parked = false;
      --n_parked_;
      continue;
    }
    if (now - group.parked_since >= tuning_.no_replica_wait) lost.add({group.expert, group.expert + 1});
    if (group.in_flight == 0) again.push_back(g);
  }
  if (!lost.empty()) {
    failure_ = Error{ErrorAction::kRetryLater,
                     "layer " + std::to_string(input_.layer) + ": no worker that can be reached answers for expert" +
                         (lost.size() > 1 ? "s " : " ") + format_ranges(lost) + ", and none came back within " +
                         std::to_string(std::chrono::duration_cast<std::chrono::seconds>(tuning_.no_replica_wait).count()) +
                         " s; start a worker that holds " + (lost.size() > 1 ? "them" : "it") +
                         ", or allow local compute (KVASIR_LOCAL=fallback)."};
    return;
  }
  for (std::uint32_t g : again) groups_[g].n_tried = 0;  // a worker that was busy may not be now
  place(fleet, again, false, now);
}

// --- the end -----------------------------------------------------------------------------

Status RoundEngine::end(Fleet& fleet, TimePoint now) {
  judge_sums();
  observe_fan_out();
  for (std::size_t i = 0; i < n_requests_; ++i) {
    Request& request = requests_[i];
    if (!request.open) continue;
    request.open = false;
    request.waited_for = false;
    Link& link = links_[request.worker];
    if (!request.is_trial) to_cancel.push_back({request.worker, request.id});
    link.unanswered.push_back({request.id, static_cast<std::uint32_t>(request.pairs.size()), request.sent_at,
                               request.final_at, request.timed, request.is_trial});
    if (link.unanswered.size() > kUnansweredMax) to_drop.push_back(request.worker);
  }
  flush_reports(fleet, now);
  std::optional<Error> failure = std::move(failure_);
  abandon();
  if (failure) return std::unexpected(*std::move(failure));
  return {};
}

void RoundEngine::abandon() {
  n_requests_ = 0;
  remaining_ = 0;
  input_.pairs = {};
  input_.weights = {};
  input_.worker_types = {};
  groups_.clear();
  unplaced_.clear();
  local_groups_.clear();
  next_local_ = 0;
  doubts_.clear();
  checks_.clear();
  asking_checks_.clear();
  local_checks_.clear();
  next_local_check_ = 0;
  n_open_checks_ = n_slots_ = 0;
  n_parked_ = 0;
  failure_.reset();
}

// --- local compute -----------------------------------------------------------------------

std::span<const std::uint32_t> RoundEngine::take_local(bool one_expert) {
  local_batch_.clear();
  local_batch_groups_.clear();
  in_local_.assign(input_.pairs.size(), 0);
  while (next_local_ < local_groups_.size()) {
    const std::uint32_t g = local_groups_[next_local_++];
    const Group& group = groups_[g];
    if (group.missing == 0) continue;
    local_batch_groups_.push_back(g);
    for (std::uint32_t i = 0; i < group.count; ++i) {
      const std::uint32_t pair = order_[group.first + i];
      if (!is_wanted(pair)) continue;
      local_batch_.push_back(pair);
      in_local_[pair] = 1;
    }
    if (one_expert) break;
  }
  return local_batch_;
}

void RoundEngine::finish_local(Nanos took) {
  for (std::uint32_t g : local_batch_groups_) {
    Group& group = groups_[g];
    counters_.pairs_local += group.missing;
    remaining_ -= group.missing;
    group.missing = 0;
    for (std::uint32_t i = 0; i < group.count; ++i) {
      const std::uint32_t pair = order_[group.first + i];
      answered_[pair] = 1;
      answered_by_[pair] = kComputedHere;  // rows per pair: all of them are written anew
    }
  }
  // Answers that came during the compute were not read then: their time is not the worker's.
  if (took <= tuning_.unread_max) return;
  for (std::size_t i = 0; i < n_requests_; ++i) requests_[i].timed = false;
}

}  // namespace kvasir::dispatch
