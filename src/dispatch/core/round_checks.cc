// RoundEngine, third part: spot checks. An expert's rows are computed a second time, here if
// that is allowed, else by another worker; where two workers disagree a third one judges.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "dispatch/core/round_engine.h"

namespace kvasir::dispatch {

void RoundEngine::add_check(std::uint32_t g, bool sample) {
  if (groups_[g].checked) return;
  groups_[g].checked = true;
  asking_checks_.push_back(static_cast<std::uint32_t>(checks_.size()));
  checks_.push_back({.group = g, .sample = sample});
  ++n_open_checks_;
}

void RoundEngine::close_check(SpotCheck& check) {
  if (!check.open) return;
  check.open = false;
  --n_open_checks_;
}

// --- asking ------------------------------------------------------------------------------

void RoundEngine::ask_opinions(Fleet& fleet, TimePoint now) {
  if (asking_checks_.empty()) return;
  const std::vector<std::uint32_t> asking = std::exchange(asking_checks_, {});
  const std::shared_ptr<const RouteTable> table = fleet.routes();
  for (std::uint32_t c : asking) {
    SpotCheck& check = checks_[c];
    if (!check.open) continue;
    const Group& group = groups_[check.group];
    if (group.local) {  // nobody else's answer is used
      close_check(check);
      continue;
    }
    KVASIR_CHECK(check.n_opinions < check.opinions.size());
    std::optional<WorkerIndex> from;
    if (local_allowed_) {
      from = kComputedHere;
    } else {
      // Not the workers the answer may come from, nor the one whose opinion is disputed.
      Group asked = group;
      for (std::uint8_t i = 0; i < check.n_opinions && asked.n_tried < kTriesMax; ++i)
        asked.tried[asked.n_tried++] = check.opinions[i].from;
      from = choose(fleet, table->find(input_.key), asked, check.sample && check.n_opinions == 0, now);
    }
    if (!from) {
      ++(check.n_opinions == 0 ? counters_.checks_unanswered : counters_.checks_undecided);
      close_check(check);
      continue;
    }
    check.asking = false;
    check.opinions[check.n_opinions++] = {.from = *from, .first_slot = n_slots_};
    n_slots_ += group.count;
    if (*from == kComputedHere) local_checks_.push_back(c);
    else ask_worker(fleet, c, *from, now);
  }
}

void RoundEngine::ask_worker(Fleet& fleet, std::uint32_t c, WorkerIndex w, TimePoint now) {
  const Group& group = groups_[checks_[c].group];
  Request& request = new_request();
  request.check = c;
  // Nobody is hedged for a second opinion. One of a sample is waited for until its first deadline, where
  // another answer would be asked for elsewhere; one that a disagreement hangs on until its second.
  request.hedge_done = !checks_[c].sample || checks_[c].n_opinions > 1;
  choose_types(request, w, group.wide);
  const std::uint64_t mark = ++stamp_;
  for (std::uint32_t i = 0; i < group.count; ++i) {
    const std::uint32_t pair = order_[group.first + i];
    const std::uint32_t row = input_.pairs[pair].row;
    request.pairs.push_back(pair);
    if (std::exchange(row_stamp_[row], mark) != mark) request.rows.push_back(row);
  }
  send(fleet, request, now);
}

std::uint32_t RoundEngine::opinion_slot(const Request& request) const {
  const SpotCheck& check = checks_[request.check];
  return check.opinions[check.n_opinions - 1].first_slot;
}

void RoundEngine::opinion_given(std::uint32_t c) {
  SpotCheck& check = checks_[c];
  Opinion& opinion = check.opinions[check.n_opinions - 1];
  if (opinion.state == Opinion::State::kPending) opinion.state = Opinion::State::kGiven;
}

// Late, lost, refused or not finite: the round does not wait for another opinion.
void RoundEngine::opinion_failed(std::uint32_t c) {
  SpotCheck& check = checks_[c];
  Opinion& opinion = check.opinions[check.n_opinions - 1];
  if (!check.open || opinion.state != Opinion::State::kPending) return;
  opinion.state = Opinion::State::kFailed;
  ++(check.n_opinions == 1 ? counters_.checks_unanswered : counters_.checks_undecided);
  close_check(check);
}

std::span<const std::uint32_t> RoundEngine::take_local_check(std::uint32_t& first_slot) {
  local_check_ = local_checks_[next_local_check_++];
  SpotCheck& check = checks_[local_check_];
  const Group& group = groups_[check.group];
  if (group.local) close_check(check);
  if (!check.open) return {};
  first_slot = check.opinions[check.n_opinions - 1].first_slot;
  return std::span<const std::uint32_t>(order_).subspan(group.first, group.count);
}

void RoundEngine::check_computed(Nanos took) {
  opinion_given(local_check_);
  // As after other local compute: answers that came meanwhile were not read.
  if (took <= tuning_.unread_max) return;
  for (std::size_t i = 0; i < n_requests_; ++i) requests_[i].timed = false;
}

// --- judging -----------------------------------------------------------------------------

bool RoundEngine::ready_to_judge(const SpotCheck& check) const {
  return check.open && !check.asking && groups_[check.group].missing == 0 &&
         check.opinions[check.n_opinions - 1].state == Opinion::State::kGiven;
}

bool RoundEngine::has_checks_to_judge() const {
  return n_open_checks_ > 0 && std::ranges::any_of(checks_, [&](const SpotCheck& check) { return ready_to_judge(check); });
}

void RoundEngine::judge_checks(CheckedRows& rows) {
  for (std::size_t c = 0; c < checks_.size(); ++c) {
    if (!ready_to_judge(checks_[c])) continue;
    SpotCheck check = checks_[c];  // a copy: what is found may add checks
    judge(check, rows);
    if (check.asking) asking_checks_.push_back(static_cast<std::uint32_t>(c));
    if (!check.open) close_check(checks_[c]);
    checks_[c].asking = check.asking;
  }
}

void RoundEngine::judge(SpotCheck& check, CheckedRows& rows) {
  const Group& group = groups_[check.group];
  const Opinion& last = check.opinions[check.n_opinions - 1];
  std::uint32_t agreeing = 0, disagreeing = 0;
  WorkerIndex answerer = kComputedHere;
  for (std::uint32_t i = 0; i < group.count; ++i) {
    const std::uint32_t pair = order_[group.first + i];
    const WorkerIndex by = answered_by_[pair];
    if (by == kComputedHere || by == last.from) continue;  // shows nothing
    answerer = by;
    ++(rows.answer_agrees(pair, last.first_slot + i) ? agreeing : disagreeing);
  }
  if (disagreeing == 0) {
    check.open = false;
    if (agreeing == 0) return;
    counters_.pairs_verified += agreeing;
    verified(answerer, agreeing);
    if (last.from != kComputedHere) verified(last.from, agreeing);
    // The judge sides with the answer: the first opinion was the wrong one.
    if (check.n_opinions == 2) {
      rows.lie_found({.worker = check.opinions[0].from, .pair = order_[group.first],
                      .slot = last.first_slot, .judge = last.from});
      lied(check.opinions[0].from, group.count);
    }
    return;
  }
  if (last.from == kComputedHere) {
    check.open = false;
    replace_wrong(check, last, rows);
    return;
  }
  if (check.n_opinions == 1) {
    check.asking = true;  // a third
    return;
  }
  check.open = false;
  const Opinion& first = check.opinions[0];
  bool both_agree = true;
  for (std::uint32_t i = 0; i < group.count; ++i) both_agree &= rows.slots_agree(first.first_slot + i, last.first_slot + i);
  if (both_agree) replace_wrong(check, last, rows);
  else ++counters_.checks_undecided;
}

// Every pair that differs from `truth`: replaced, and the worker that answered it reported.
void RoundEngine::replace_wrong(const SpotCheck& check, const Opinion& truth, CheckedRows& rows) {
  const Group& group = groups_[check.group];
  for (std::uint32_t i = 0; i < group.count; ++i) {
    const std::uint32_t pair = order_[group.first + i], slot = truth.first_slot + i;
    const WorkerIndex by = answered_by_[pair];
    if (by == kComputedHere || by == truth.from || rows.answer_agrees(pair, slot)) continue;
    rows.lie_found({.worker = by, .pair = pair, .slot = slot, .judge = truth.from});
    rows.replace_answer(pair, slot);
    answered_by_[pair] = kComputedHere;
    lied(by, 1);
  }
}

void RoundEngine::verified(WorkerIndex w, std::uint32_t pairs) {
  reports_.push_back({.kind = Report::Kind::kVerified, .worker = w, .pairs = pairs});
}

void RoundEngine::lied(WorkerIndex w, std::uint32_t pairs) {
  counters_.pairs_wrong += pairs;
  // One offence a round, however many of its pairs were wrong.
  const auto told = std::ranges::find_if(
      reports_, [&](const Report& report) { return report.kind == Report::Kind::kLied && report.worker == w; });
  if (told != reports_.end()) {
    told->pairs += pairs;
    return;
  }
  reports_.push_back({.kind = Report::Kind::kLied, .worker = w, .pairs = pairs});
  // Nothing else it said in this round is believed unseen.
  for (std::uint32_t pair = 0; pair < answered_.size(); ++pair)
    if (answered_[pair] && answered_by_[pair] == w) add_check(pair_group_[pair], false);
}

}  // namespace kvasir::dispatch
