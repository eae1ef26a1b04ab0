// RoundEngine, second half: which worker is asked for which expert.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "dispatch/core/round_engine.h"
#include "wire/codec.h"

namespace kvasir::dispatch {

namespace {

constexpr int kNearlyEqualOneIn = 16;
constexpr std::uint32_t kLooksMax = 8;  // at workers, for two that could take a whole round

}  // namespace

std::uint32_t exec_rows_max(std::size_t row_bytes) {
  constexpr std::size_t kTablesBytes = wire::kExecHeadBytes + std::size_t{wire::kExecPairsMax} * (wire::kPairBytes + sizeof(float));
  static_assert(kTablesBytes < wire::kFramePayloadBytesMax);
  return static_cast<std::uint32_t>(std::min<std::size_t>(
      wire::kExecRowsMax, (wire::kFramePayloadBytesMax - kTablesBytes) / std::max<std::size_t>(row_bytes, 1)));
}

std::uint32_t exec_pairs_max(std::size_t result_row_bytes) {
  return static_cast<std::uint32_t>(std::min<std::size_t>(
      wire::kExecPairsMax, wire::kAnswerBytesMax / std::max<std::size_t>(result_row_bytes, 1)));
}

Status RoundEngine::begin(Fleet& fleet, const RoundInput& input, TimePoint now) {
  KVASIR_CHECK(n_requests_ == 0);
  KVASIR_CHECK(input.weights.empty() || input.weights.size() == input.pairs.size());
  to_send.clear();
  to_cancel.clear();
  to_drop.clear();
  quarantined.clear();
  timings.clear();
  failure_.reset();
  input_ = input;
  remaining_ = 0;
  KVASIR_TRY(group_pairs(input));
  remaining_ = static_cast<std::uint32_t>(input.pairs.size());

  flush_reports(fleet, now);
  // A link that has owed an answer for long is replaced, so that it can prove itself.
  for (WorkerIndex w = 0; w < links_.size(); ++w) {
    const Link& link = links_[w];
    if (link.stalled && !link.unanswered.empty() &&
        now >= link.unanswered.front().final_at + tuning_.stall_reconnect)
      to_drop.push_back(w);
  }
  placing_.clear();
  for (std::uint32_t g = 0; g < groups_.size(); ++g) placing_.push_back(g);
  place(fleet, placing_, false, now);
  ask_opinions(fleet, now);
  return {};
}

Status RoundEngine::group_pairs(const RoundInput& input) {
  if (input.pairs.size() > kRoundPairsMax || input.n_expert > wire::kExpertsMax)
    return fix_input("layer " + std::to_string(input.layer) + " asks for " + std::to_string(input.pairs.size()) +
                     " expert uses at once; lower --ubatch-size.");
  if (expert_stamp_.size() < input.n_expert) {
    expert_stamp_.resize(input.n_expert, 0);
    expert_slot_.resize(input.n_expert);
  }
  if (row_stamp_.size() < input.n_rows) {
    row_stamp_.resize(input.n_rows, 0);
    row_number_.resize(input.n_rows);
  }
  groups_.clear();
  answered_.assign(input.pairs.size(), 0);
  answered_by_.resize(input.pairs.size());
  pair_group_.resize(input.pairs.size());
  order_.resize(input.pairs.size());
  const std::uint64_t stamp = ++stamp_;
  for (std::size_t i = 0; i < input.pairs.size(); ++i) {
    const wire::Pair pair = input.pairs[i];
    if (pair.expert >= input.n_expert || pair.row >= input.n_rows)
      return fix_input("layer " + std::to_string(input.layer) + ": the router picked expert " +
                       std::to_string(pair.expert) + " of " + std::to_string(input.n_expert) + " for row " +
                       std::to_string(pair.row) + "; the model file is damaged or its graph is misread.");
    if (expert_stamp_[pair.expert] != stamp) {
      expert_stamp_[pair.expert] = stamp;
      expert_slot_[pair.expert] = static_cast<std::uint32_t>(groups_.size());
      groups_.emplace_back().expert = pair.expert;
    }
    pair_group_[i] = expert_slot_[pair.expert];
    ++groups_[pair_group_[i]].count;
  }
  std::uint32_t first = 0;
  for (Group& group : groups_) {
    group.first = first;
    first += std::exchange(group.count, 0);
  }
  for (std::uint32_t i = 0; i < input.pairs.size(); ++i) {
    Group& group = groups_[pair_group_[i]];
    order_[group.first + group.count++] = i;
  }
  for (Group& group : groups_) {
    group.missing = group.count;
    const std::uint64_t mark = ++stamp_;
    for (std::uint32_t i = 0; i < group.count; ++i) {
      std::uint64_t& row = row_stamp_[input.pairs[order_[group.first + i]].row];
      group.repeated |= row == mark;
      row = mark;
    }
  }
  return {};
}

// Gives each group to a worker, or to local compute, or parks it.
void RoundEngine::place(Fleet& fleet, std::vector<std::uint32_t>& groups, bool hedge, TimePoint now) {
  const std::shared_ptr<const RouteTable> table = fleet.routes();
  const LayerRoutes* routes = table->find(input_.key);
  grow(fleet.size());
  const std::optional<WorkerIndex> for_all = hedge || n_requests_ > 0 ? std::nullopt : choose_for_all(fleet, routes, groups, now);
  // Large experts first: the small ones then even the workers out.
  // Equal ones in their own order, without the memory that a stable sort asks for.
  std::ranges::sort(groups, {}, [&](std::uint32_t g) { return std::pair(~groups_[g].count, g); });
  touched_.clear();
  for (std::uint32_t g : groups) {
    Group& group = groups_[g];
    if (group.missing == 0 || group.local) continue;
    const bool prefer_local = !hedge && is_for_here(group);
    std::optional<WorkerIndex> passed_over;
    const std::optional<WorkerIndex> w = prefer_local ? std::nullopt
                                         : for_all    ? for_all
                                                      : choose(fleet, routes, group, hedge, now, &passed_over);
    if (!w) {
      if (!hedge) no_replica(g, now);
      continue;
    }
    if (by_worker_[*w].empty()) touched_.push_back(*w);
    by_worker_[*w].push_back(g);
    pairs_on_worker_[*w] += group.count;
    if (passed_over && by_worker_[*passed_over].empty() && group.count <= tuning_.trial_pairs_max && fleet.begin_trial(*passed_over, now))
      trials_.push_back({*passed_over, {g}});
  }
  for (WorkerIndex w : touched_) {
    // In wire order the experts ascend, as their weights lie in the worker's memory; those that
    // travel in f32 come last, in a request of their own.
    std::ranges::sort(by_worker_[w], {}, [&](std::uint32_t g) { return std::pair(groups_[g].wide, groups_[g].expert); });
    build_requests(fleet, w, by_worker_[w], hedge, now);
    by_worker_[w].clear();
    pairs_on_worker_[w] = 0;
  }
  send_trials(fleet, now);
}

// Of two that could, found from a random place on, the one expected to finish first.
std::optional<WorkerIndex> RoundEngine::choose_for_all(Fleet& fleet, const LayerRoutes* routes, std::span<const std::uint32_t> groups,
                                                       TimePoint now) {
  way_.reset();
  if (routes == nullptr || groups.size() < 2 || remaining_ > std::min(FanOut::kPairsMax, input_.request_pairs_max) ||
      input_.n_rows > input_.request_rows_max)
    return std::nullopt;
  const std::span<const WorkerIndex> replicas = routes->replicas(groups_[groups[0]].expert);
  const auto n = static_cast<std::uint32_t>(replicas.size());
  if (n < 2) return std::nullopt;  // there is no choice
  const std::uint32_t first = fleet.rng().below(n);
  std::optional<WorkerIndex> chosen, passed_over;
  for (std::uint32_t i = 0; i < std::min(n, kLooksMax) && !passed_over; ++i) {
    const WorkerIndex w = replicas[(first + i) % n];
    if (can_take_all(fleet, *routes, groups, w, now)) passed_over = std::exchange(chosen, w);
  }
  if (!chosen) return std::nullopt;
  if (passed_over) {
    const Nanos before = fleet.earliest_finish(*passed_over, remaining_, now);
    if (fleet.earliest_finish(*chosen, remaining_, now) >= before - before / kNearlyEqualOneIn) std::swap(chosen, passed_over);
  }
  placed_at_ = now;
  way_ = fan_out_.choose(remaining_);
  if (way_ != FanOutWay::kGather) return std::nullopt;
  if (passed_over && fleet.begin_trial(*passed_over, now)) {
    Trial& trial = trials_.emplace_back(*passed_over);
    for (const std::uint32_t g : groups)
      if (!is_for_here(groups_[g])) trial.groups.push_back(g);
    if (trial.groups.empty()) trials_.pop_back();
  }
  return chosen;
}

bool RoundEngine::can_take_all(Fleet& fleet, const LayerRoutes& routes, std::span<const std::uint32_t> groups, WorkerIndex w,
                               TimePoint now) const {
  if (w >= links_.size()) return false;
  const Link& link = links_[w];
  if (!link.ready || link.stalled || link.suspect || !fleet.is_measured(w) || fleet.refuses_layer(w, input_.key) ||
      fleet.usable(w, now) != Usable::kYes)
    return false;
  return std::ranges::all_of(groups, [&](std::uint32_t g) {
    const Group& group = groups_[g];
    return is_for_here(group) || (!group.repeated && std::ranges::binary_search(routes.replicas(group.expert), w));
  });
}

// Whole rounds tell what a way costs; one that a hedge, a lost worker or local compute took part in does not.
void RoundEngine::observe_fan_out() {
  if (!way_ || !doubts_.empty() || !local_groups_.empty()) return;
  for (std::size_t i = 0; i < n_requests_; ++i) {
    const Request& request = requests_[i];
    if (request.is_trial || request.check != Request::kNoCheck) continue;
    if (request.is_hedge || !request.timed || request.received < request.answer_rows()) return;
  }
  fan_out_.observe(*way_, static_cast<std::uint32_t>(input_.pairs.size()), last_answer_ - placed_at_);
}

void RoundEngine::send_trials(Fleet& fleet, TimePoint now) {
  for (const Trial& trial : trials_) {
    Request& request = new_request();
    choose_types(request, trial.worker, groups_[trial.groups.front()].wide);
    request.is_trial = request.hedge_done = true;
    request.waited_for = false;
    const std::uint64_t mark = ++stamp_;
    for (const std::uint32_t g : trial.groups) {
      const Group& group = groups_[g];
      for (std::uint32_t i = 0; i < group.count; ++i) {
        const std::uint32_t pair = order_[group.first + i];
        request.pairs.push_back(pair);
        if (std::exchange(row_stamp_[input_.pairs[pair].row], mark) != mark) request.rows.push_back(input_.pairs[pair].row);
      }
    }
    send(fleet, request, now);
  }
  trials_.clear();
}

std::optional<WorkerIndex> RoundEngine::choose(Fleet& fleet, const LayerRoutes* routes, const Group& group, bool spare,
                                               TimePoint now, std::optional<WorkerIndex>* passed_over) {
  if (routes == nullptr || group.repeated || group.n_tried == kTriesMax || group.count > input_.request_pairs_max ||
      group.count > input_.request_rows_max)
    return std::nullopt;
  const auto replicas = routes->replicas(group.expert);
  // Two candidates drawn from the best class by reservoir sampling.
  WorkerIndex drawn[2] = {};
  std::uint32_t n = 0;
  Usable best = spare ? Usable::kYes : Usable::kAvoid;  // from a doubtful worker it is worth nothing
  for (WorkerIndex w : replicas) {
    const Link& link = links_[w];
    if (!link.ready || link.stalled) continue;
    if (std::find(group.tried.begin(), group.tried.begin() + group.n_tried, w) != group.tried.begin() + group.n_tried)
      continue;
    Usable usable = fleet.usable(w, now);
    if (usable == Usable::kYes && link.suspect) usable = Usable::kAvoid;
    if (usable < best || usable == Usable::kNo || fleet.refuses_layer(w, input_.key)) continue;
    if (usable > best) {
      best = usable;
      n = 0;
    }
    if (n < 2) {
      drawn[n] = w;
    } else if (const std::uint32_t slot = fleet.rng().below(n + 1); slot < 2) {
      drawn[slot] = w;
    }
    ++n;
  }
  if (n == 0) return std::nullopt;
  if (n == 1) return drawn[0];
  if (fleet.rng().below(2) == 1) std::swap(drawn[0], drawn[1]);  // ties fall evenly
  for (const WorkerIndex w : drawn)
    if (!spare && !fleet.is_measured(w) && fleet.rng().below(tuning_.unmeasured_one_in) == 0) return w;
  const Nanos first = fleet.predicted_finish(drawn[0], pairs_on_worker_[drawn[0]] + group.count, now);
  const Nanos second = fleet.predicted_finish(drawn[1], pairs_on_worker_[drawn[1]] + group.count, now);
  // Nearly equal: as they were drawn, so that the work is shared and both stay measured.
  const bool swapped = second < first - first / kNearlyEqualOneIn;
  if (passed_over != nullptr && !spare) *passed_over = drawn[swapped ? 0 : 1];
  return drawn[swapped ? 1 : 0];
}

void RoundEngine::no_replica(std::uint32_t g, TimePoint now) {
  Group& group = groups_[g];
  if (local_allowed_) {
    group.local = true;
    local_groups_.push_back(g);
    return;
  }
  const std::string what = "layer " + std::to_string(input_.layer) + ", expert " + std::to_string(group.expert);
  if (group.repeated) {
    failure_ = Error{ErrorAction::kFixInput, what + ": the router picked it twice for one row; the graph is misread."};
  } else if (group.count > input_.request_rows_max || group.count > input_.request_pairs_max) {
    failure_ = Error{ErrorAction::kFixInput, what + ": " + std::to_string(group.count) +
                                                 " rows do not fit one request; lower --ubatch-size."};
  } else if (group.not_finite) {
    failure_ = Error{ErrorAction::kRetryElsewhere,
                     what + ": every worker asked answered with NaN or infinity; the activations overflow, or the weights are damaged."};
  } else if (!group.parked) {
    group.parked = true;
    group.parked_since = now;
    if (n_parked_++ == 0) retry_at_ = now + tuning_.no_replica_retry;
  }
}

// Cuts the worker's experts into requests that fit the limits.
bool RoundEngine::build_requests(Fleet& fleet, WorkerIndex w, std::span<const std::uint32_t> groups, bool hedge,
                                 TimePoint now) {
  std::size_t at = 0;
  while (at < groups.size()) {
    if (hedge && !fleet.spend_hedge()) {
      ++counters_.hedges_denied;
      return false;
    }
    Request& request = new_request();
    const bool wide = groups_[groups[at]].wide;
    choose_types(request, w, wide);
    const std::uint64_t mark = ++stamp_;
    for (; at < groups.size() && groups_[groups[at]].wide == wide; ++at) {
      Group& group = groups_[groups[at]];
      std::uint32_t new_rows = 0, new_pairs = 0;
      for (std::uint32_t i = 0; i < group.count; ++i) {
        const std::uint32_t pair = order_[group.first + i];
        if (!is_wanted(pair)) continue;
        ++new_pairs;
        new_rows += row_stamp_[input_.pairs[pair].row] != mark;
      }
      if (request.pairs.size() + new_pairs > input_.request_pairs_max) break;
      if (request.rows.size() + new_rows > input_.request_rows_max) break;
      add_to(request, groups[at], mark);
      group.tried[group.n_tried++] = w;
      group.hedged |= hedge;
      // A sum over a request's experts says nothing about one of them.
      if (!input_.weighted() && fleet.draw_check(w, group.count)) add_check(groups[at], tuning_.spot_check < 1);
    }
    request.is_hedge = hedge;
    request.hedge_done = hedge;
    if (hedge) ++counters_.hedges; else fleet.earn_hedge();
    send(fleet, request, now);
  }
  return true;
}

// Rows of a request to that worker; `wide`: a narrow type has not held them.
void RoundEngine::choose_types(Request& request, WorkerIndex w, bool wide) const {
  const bool own = !input_.worker_types.empty();
  request.worker = w;
  request.row_type = wide ? wire::RowType::kF32 : own ? input_.worker_types[w] : input_.row_type;
  request.result_type = wide ? wire::RowType::kF32 : own ? input_.worker_types[w] : input_.result_type;
}

// Its worker, types, rows and pairs are chosen.
void RoundEngine::send(Fleet& fleet, Request& request, TimePoint now) {
  finish_request(request);
  const std::uint32_t n_pairs = static_cast<std::uint32_t>(request.pairs.size());
  const Fleet::Deadlines deadlines = fleet.deadlines(request.worker, n_pairs, now);
  request.sent_at = now;
  request.expected = deadlines.measured ? deadlines.expected : Nanos(0);
  request.hedge_at = now + deadlines.hedge;
  request.final_at = now + deadlines.final;
  if (fleet.is_busy(request.worker, n_pairs, now)) ++counters_.busy;
  fleet.on_sent(request.worker, n_pairs);
  ++(request.is_trial ? counters_.trials : counters_.requests);
  to_send.push_back(static_cast<std::uint32_t>(n_requests_ - 1));
}

void RoundEngine::add_to(Request& request, std::uint32_t g, std::uint64_t mark) {
  Group& group = groups_[g];
  for (std::uint32_t i = 0; i < group.count; ++i) {
    const std::uint32_t pair = order_[group.first + i];
    if (!is_wanted(pair)) continue;
    const std::uint32_t row = input_.pairs[pair].row;
    if (row_stamp_[row] != mark) {
      row_stamp_[row] = mark;
      request.rows.push_back(row);
    }
    request.pairs.push_back(pair);
  }
  request.groups.push_back(g);
  ++group.in_flight;
  if (group.parked) {
    group.parked = false;
    --n_parked_;
  }
}

// Rows in ascending order, the pairs as they travel, and which of them make up each row's sum.
void RoundEngine::finish_request(Request& request) {
  std::ranges::sort(request.rows);
  for (std::uint32_t r = 0; r < request.rows.size(); ++r) row_number_[request.rows[r]] = r;
  for (std::uint32_t pair : request.pairs)
    request.wire_pairs.push_back({row_number_[input_.pairs[pair].row], input_.pairs[pair].expert});
  if (!input_.weighted()) return;
  for (std::uint32_t pair : request.pairs) request.weights.push_back(input_.weights[pair]);
  request.row_ends.assign(request.rows.size(), 0);
  for (const wire::Pair& pair : request.wire_pairs) ++request.row_ends[pair.row];
  std::uint32_t begin = 0;
  for (std::uint32_t& end : request.row_ends) begin += std::exchange(end, begin);
  request.row_pairs.resize(request.pairs.size());
  for (std::size_t i = 0; i < request.pairs.size(); ++i)
    request.row_pairs[request.row_ends[request.wire_pairs[i].row]++] = request.pairs[i];
}

Request& RoundEngine::new_request() {
  if (n_requests_ == requests_.size()) requests_.emplace_back();
  Request& request = requests_[n_requests_++];
  request.id = next_id_++;
  request.pairs.clear();
  request.wire_pairs.clear();
  request.rows.clear();
  request.weights.clear();
  request.row_pairs.clear();
  request.row_ends.clear();
  request.groups.clear();
  request.received = 0;
  request.check = Request::kNoCheck;
  request.is_hedge = request.hedge_done = request.is_trial = false;
  request.open = request.waited_for = request.timed = true;
  return request;
}

// Asks a second replica for what `request` has not answered yet.
void RoundEngine::hedge(Fleet& fleet, Request& request, TimePoint now) {
  std::vector<std::uint32_t> groups;
  for (std::uint32_t g : request.groups)
    if (groups_[g].missing > 0 && groups_[g].in_flight == 1 && !groups_[g].hedged) groups.push_back(g);
  const std::uint64_t denied = counters_.hedges_denied;
  const std::size_t position = static_cast<std::size_t>(&request - requests_.data());
  place(fleet, groups, true, now);
  Request& self = requests_[position];  // placing may have moved the vector
  // Without budget it is tried again later; the second deadline bounds it.
  if (counters_.hedges_denied > denied) self.hedge_at = now + (self.final_at - now) / 4 + Nanos(1);
  else self.hedge_done = true;
}

}  // namespace kvasir::dispatch
