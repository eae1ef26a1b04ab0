// One driver's rounds as a state machine: events and time in, orders out.
//
// The caller feeds link changes, answers and time, and carries out the orders: requests to
// send, requests to cancel, links to drop, experts to compute locally. Methods that take the
// Fleet need its lock; on_result does not, so that decoding megabytes holds nobody up.
//
// Rows per pair: an expert's pairs always travel together, also when they are asked for
// again, because exact numerics depend on it (the kernels' bits depend on how many rows
// share an expert).
//
// Weighted sums: an answer has one row per row asked, the sum over the request's pairs of
// that row. Such a sum counts if none of its pairs has been counted, else it is dropped as a
// whole, and what it alone would have brought is asked for again: each pair contributes once.
// Only missing pairs are asked for again.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "dispatch/core/fan_out.h"
#include "dispatch/core/fleet.h"
#include "dispatch/core/hot_set.h"
#include "dispatch/core/spot_check.h"
#include "wire/messages.h"

namespace kvasir::dispatch {

struct RoundInput {
  LayerKey key;
  std::uint32_t layer = 0;  // for messages
  std::uint32_t n_expert = 0;
  std::uint32_t n_rows = 0;
  std::uint32_t n_embd = 0;
  wire::RowType row_type = wire::RowType::kF32;
  wire::RowType result_type = wire::RowType::kF32;
  // By worker, instead of the two above; empty: those. Borrowed until end().
  std::span<const wire::RowType> worker_types{};
  // What fits one EXEC and its answer: see exec_rows_max() and exec_pairs_max().
  std::uint32_t request_rows_max = 0;
  std::uint32_t request_pairs_max = 0;
  std::span<const wire::Pair> pairs{};   // borrowed until end()
  // One per pair, finite: answers are weighted sums. Empty: rows per pair. Borrowed until end().
  std::span<const float> weights{};
  bool weighted() const { return !weights.empty(); }
  // Experts to compute here although workers hold them, where that is allowed.
  HotSet::Members hot{};
};

// What a row of an answer holds, as far as numbers go.
enum class RowState : std::uint8_t { kFinite, kInfinite, kNan };

// Rows of `row_bytes` that fit one EXEC beside the largest pair table.
std::uint32_t exec_rows_max(std::size_t row_bytes);
// Pairs whose answers of `result_row_bytes` each stay under the limit of one answer.
std::uint32_t exec_pairs_max(std::size_t result_row_bytes);

// What goes to one worker as one EXEC.
struct Request {
  std::uint64_t id = 0;
  WorkerIndex worker = 0;
  std::vector<std::uint32_t> pairs;     // positions in the round's pairs, in wire order
  std::vector<wire::Pair> wire_pairs;   // the same, rows renumbered
  std::vector<std::uint32_t> rows;      // wire row r is the round's row rows[r]; ascending
  std::vector<float> weights;           // of the pairs, with weighted sums
  wire::RowType row_type = wire::RowType::kF32, result_type = wire::RowType::kF32;

  // Weighted sums: the round's pairs in wire row r are row_pairs[row_ends[r - 1], row_ends[r]).
  std::vector<std::uint32_t> row_pairs, row_ends;
  std::span<const std::uint32_t> pairs_of(std::uint32_t wire_row) const {
    const std::uint32_t begin = wire_row == 0 ? 0 : row_ends[wire_row - 1];
    return std::span(row_pairs).subspan(begin, row_ends[wire_row] - begin);
  }
  std::uint32_t answer_rows() const { return static_cast<std::uint32_t>(row_ends.empty() ? pairs.size() : rows.size()); }

  // The engine's own book-keeping.
  std::vector<std::uint32_t> groups;
  TimePoint sent_at{}, hedge_at{}, final_at{};
  Nanos expected{};  // 0: never measured
  std::uint32_t received = 0;  // answer rows so far
  bool open = false;           // an answer may still come
  bool waited_for = false;     // not past its second deadline: groups count on it
  bool hedge_done = false;     // nothing more to ask another replica for
  bool is_hedge = false;
  bool is_trial = false;       // a copy, to measure a worker: its answer is not used or waited for
  bool timed = false;          // its latency is worth measuring
  std::uint32_t check = kNoCheck;  // a second opinion: its answer goes to that check
  static constexpr std::uint32_t kNoCheck = std::numeric_limits<std::uint32_t>::max();
};

enum class Verdict : std::uint8_t {
  kTaken,
  kLate,     // belongs to an abandoned request
  kUnknown,  // answers nothing this link was asked
  kInvalid,  // breaks its request's shape: drop the link
};

struct RoundCounters {
  std::uint64_t pairs_remote = 0, pairs_local = 0;
  std::uint64_t requests = 0, hedges = 0, hedges_denied = 0, redispatched = 0;
  std::uint64_t late_answers = 0, unknown_answers = 0, invalid_answers = 0;
  std::uint64_t busy = 0;  // requests that were refused for lack of room, or went to a long queue
  std::uint64_t trials = 0;  // not among the requests
  std::uint64_t sums_dropped = 0;  // a part of them had been counted
  std::uint64_t pairs_verified = 0, pairs_wrong = 0;  // by spot checks
  std::uint64_t checks_unanswered = 0;                // drawn, and nobody could give a second opinion
  std::uint64_t checks_undecided = 0;                 // two workers disagree, and nobody could judge
};

class RoundEngine {
 public:
  RoundEngine(std::size_t n_workers, bool local_allowed, const Tuning& tuning);

  // --- links: one per worker, for data; slots that the fleet gains later are added ---
  void link_up(WorkerIndex w);
  // Its requests fail; their experts are placed anew by the next advance().
  void link_down(WorkerIndex w);
  bool link_ready(WorkerIndex w) const { return w < links_.size() && links_[w].ready; }

  // --- a round ---
  // Refuses pairs out of range. Places every expert; then carry out the orders.
  Status begin(Fleet& fleet, const RoundInput& input, TimePoint now);
  // Deadlines, failed requests, reports. Call when needs_advance(now).
  void advance(Fleet& fleet, TimePoint now);
  bool needs_advance(TimePoint now) const;
  // When advance() is due if nothing else happens.
  TimePoint next_wake() const;
  bool finished() const { return (remaining_ == 0 && n_open_checks_ == 0) || failure_.has_value(); }
  // After finished(), or earlier to give up: abandons what is outstanding and tells the fleet.
  // May add orders.
  Status end(Fleet& fleet, TimePoint now);

  // Gives up the round at once, after the links were taken down (out of memory).
  void abandon();
  // Between rounds: tells the fleet what link_down() left to say.
  void settle(Fleet& fleet, TimePoint now) { flush_reports(fleet, now); }

  // --- answers ---
  // `sink(i, pair)` is called for each row i of the frame that is still wanted; it writes
  // the output of the round's pair `pair` and says what it found. With weighted sums it is
  // sink(i, row) for the round's row, and adds to the output only if all is finite.
  // `check_sink(i, slot)` writes a row of a second opinion (see check_slots()); it may be left
  // out where no spot checks are drawn.
  struct NoChecks {
    RowState operator()(std::uint32_t, std::uint32_t) const { return RowState::kNan; }
  };
  template <typename Sink, typename CheckSink = NoChecks>
  Verdict on_result(WorkerIndex w, std::uint64_t id, const wire::ResultHead& head, bool more, TimePoint now,
                    Sink&& sink, CheckSink&& check_sink = {}) {
    Request* request = nullptr;
    const Verdict verdict = check_result(w, id, head, more, now, request);
    if (verdict != Verdict::kTaken) return verdict;
    if (request->is_trial) {
      result_taken(*request, head, now);
      return Verdict::kTaken;
    }
    if (request->check != Request::kNoCheck) {
      for (std::uint32_t i = 0; i < head.n_rows; ++i)
        if (check_sink(i, opinion_slot(*request) + head.first_row + i) != RowState::kFinite) opinion_failed(request->check);
      result_taken(*request, head, now);
      return Verdict::kTaken;
    }
    for (std::uint32_t i = 0; i < head.n_rows; ++i) {
      const std::uint32_t at = head.first_row + i;
      if (input_.weighted()) {
        if (!sum_wanted(*request, at)) continue;
        const RowState state = sink(i, request->rows[at]);
        for (std::uint32_t pair : request->pairs_of(at)) pair_came(*request, pair, state);
      } else if (const std::uint32_t pair = request->pairs[at]; !answered_[pair]) {
        pair_came(*request, pair, sink(i, pair));
      }
    }
    result_taken(*request, head, now);
    return Verdict::kTaken;
  }
  // An ERROR frame. kInvalid: drop the link.
  Verdict on_error(WorkerIndex w, std::uint64_t id, wire::ErrorCode code, TimePoint now);
  // Bytes that are no valid frame, or one that has no place here; the caller drops the link.
  void on_invalid(WorkerIndex w);

  // --- local compute ---
  bool has_local() const { return next_local_ < local_groups_.size(); }
  bool awaits_remote() const;
  // The workers that owe this round an answer; `f` may take links down.
  template <typename F>
  void for_each_owing(F&& f) {
    for (std::size_t i = 0; i < n_requests_; ++i)
      if (requests_[i].open) f(requests_[i].worker);
  }
  // All pairs of the next expert, or of all experts that wait (with weighted sums those that
  // are missing); empty if they were answered meanwhile. Valid until the next call.
  std::span<const std::uint32_t> take_local(bool one_expert);
  // It took `took`, in which no answer was read. `is_finite(pair)` looks at the output just
  // written; with weighted sums, at its row's sum.
  template <typename IsFinite>
  void local_done(Nanos took, IsFinite&& is_finite) {
    for (Doubt& doubt : doubts_) {
      if (!in_local_[doubt.pair]) continue;
      const bool finite = is_finite(doubt.pair);
      if (input_.weighted()) doubt.excused |= !finite;
      else if (finite) blame(doubt.worker);
    }
    finish_local(took);
  }

  // --- spot checks: second opinions, on rows in slots of the caller's ---
  // Slots in use; the buffer may have to grow after orders and before answers.
  std::uint32_t check_slots() const { return n_slots_; }
  bool has_local_check() const { return next_local_check_ < local_checks_.size(); }
  // All pairs of an expert to compute here into slots from `first_slot` on; empty if that is
  // needed no longer. Then check_computed(), with the time that took.
  std::span<const std::uint32_t> take_local_check(std::uint32_t& first_slot);
  void check_computed(Nanos took);
  bool has_checks_to_judge() const;
  // Compares where both sides are there; what is wrong is replaced and its worker reported.
  void judge_checks(CheckedRows& rows);
  // Asks for a check of the expert of that pair, beside those that are drawn.
  void check_expert_of(std::uint32_t pair) { add_check(pair_group_[pair], false); }

  // --- orders: read, carry out, clear ---
  struct Cancel {
    WorkerIndex worker;
    std::uint64_t id;
  };
  std::vector<std::uint32_t> to_send;      // positions for request()
  std::vector<Cancel> to_cancel;
  std::vector<WorkerIndex> to_drop;        // links owing answers for too long
  std::vector<WorkerIndex> quarantined;    // for the log; their links must be dropped
  const Request& request(std::uint32_t i) const { return requests_[i]; }
  // What answers of this round took, as a multiple of what was expected; for reading.
  struct Timing {
    WorkerIndex worker;
    wire::RowType type;
    double ratio;
  };
  std::vector<Timing> timings;

  const RoundCounters& counters() const { return counters_; }
  // Requests sent and neither answered nor forgotten; 0 once every link is down.
  std::size_t outstanding() const;
  // Does some link owe an answer to a round that is over?
  bool owes_answers() const {
    for (const Link& link : links_)
      if (!link.unanswered.empty()) return true;
    return false;
  }

 private:
  struct Group {  // one expert of the round
    std::uint32_t expert = 0;
    std::uint32_t first = 0, count = 0;  // in order_
    std::uint32_t missing = 0;
    std::uint32_t in_flight = 0;         // requests waited for
    std::uint8_t n_tried = 0;
    std::array<WorkerIndex, kTriesMax> tried{};
    bool hedged = false, not_finite = false, local = false, parked = false, repeated = false;
    bool checked = false;                // a spot check was drawn
    bool wide = false;  // its values overflowed a narrow row type: asked for in f32
    TimePoint parked_since{};
  };
  struct Unanswered {  // a request of an earlier round
    std::uint64_t id;
    std::uint32_t pairs;
    TimePoint sent_at, final_at;
    bool timed;
    bool is_trial;
  };
  struct Link {
    bool ready = false;
    bool suspect = false;  // owes an answer past its first deadline
    bool stalled = false;  // …past its second: asked nothing
    std::vector<Unanswered> unanswered;
  };
  // A row with a NaN or infinity in it that cannot have come from the narrowing of an honest
  // one. Per pair, the first other answer judges the worker; of a sum all its pairs are in
  // doubt, and only the whole round can.
  struct Doubt {
    std::uint32_t pair;
    WorkerIndex worker;
    bool excused = false;
  };

  Verdict check_result(WorkerIndex w, std::uint64_t id, const wire::ResultHead& head, bool more, TimePoint now,
                       Request*& request);
  void result_taken(Request& request, const wire::ResultHead& head, TimePoint now);
  bool sum_wanted(const Request& request, std::uint32_t wire_row);
  void pair_came(const Request& request, std::uint32_t pair, RowState state);
  void judge_sums();
  void blame(WorkerIndex w);
  void finish_local(Nanos took);

  // round_checks.cc
  void add_check(std::uint32_t group, bool sample);
  void ask_opinions(Fleet& fleet, TimePoint now);
  void ask_worker(Fleet& fleet, std::uint32_t check, WorkerIndex w, TimePoint now);
  std::uint32_t opinion_slot(const Request& request) const;
  void opinion_given(std::uint32_t check);
  void opinion_failed(std::uint32_t check);
  void close_check(SpotCheck& check);
  bool ready_to_judge(const SpotCheck& check) const;
  void judge(SpotCheck& check, CheckedRows& rows);
  void replace_wrong(const SpotCheck& check, const Opinion& truth, CheckedRows& rows);
  void lied(WorkerIndex w, std::uint32_t pairs);
  void verified(WorkerIndex w, std::uint32_t pairs);

  Request* find_open(WorkerIndex w, std::uint64_t id);
  bool take_unanswered(WorkerIndex w, std::uint64_t id, bool complete, bool refused, TimePoint now);
  void stop_waiting(Request& request);
  void answer_came(WorkerIndex w);

  void grow(std::size_t n_workers);
  Status group_pairs(const RoundInput& input);
  void place(Fleet& fleet, std::vector<std::uint32_t>& groups, bool hedge, TimePoint now);
  // `spare`: for an answer that the round can do without, so only of a worker without doubts.
  // `passed_over`: the other one of two candidates, if both were measured.
  std::optional<WorkerIndex> choose(Fleet& fleet, const LayerRoutes* routes, const Group& group, bool spare,
                                    TimePoint now, std::optional<WorkerIndex>* passed_over = nullptr);
  // One worker for all of `groups`, where there is one and small rounds are quicker so.
  std::optional<WorkerIndex> choose_for_all(Fleet& fleet, const LayerRoutes* routes, std::span<const std::uint32_t> groups, TimePoint now);
  bool can_take_all(Fleet& fleet, const LayerRoutes& routes, std::span<const std::uint32_t> groups, WorkerIndex w, TimePoint now) const;
  void observe_fan_out();
  void send_trials(Fleet& fleet, TimePoint now);
  bool build_requests(Fleet& fleet, WorkerIndex w, std::span<const std::uint32_t> groups, bool hedge, TimePoint now);
  void no_replica(std::uint32_t group, TimePoint now);
  void choose_types(Request& request, WorkerIndex w, bool wide) const;
  void send(Fleet& fleet, Request& request, TimePoint now);
  void check_deadlines(Fleet& fleet, TimePoint now);
  void hedge(Fleet& fleet, Request& request, TimePoint now);
  void retry_parked(Fleet& fleet, TimePoint now);
  void flush_reports(Fleet& fleet, TimePoint now);
  Request& new_request();
  bool is_hot(const Group& group) const { return input_.hot && group.expert < input_.hot->size() && (*input_.hot)[group.expert] != 0; }
  bool is_for_here(const Group& group) const { return local_allowed_ && (group.not_finite || group.wide || is_hot(group)); }
  bool is_wanted(std::uint32_t pair) const { return !input_.weighted() || !answered_[pair]; }
  void add_to(Request& request, std::uint32_t group, std::uint64_t mark);
  void finish_request(Request& request);

  const Tuning tuning_;
  const bool local_allowed_;
  std::vector<Link> links_;
  std::uint64_t next_id_ = 1;

  // The round. Vectors keep their capacity from round to round.
  RoundInput input_;
  std::vector<Group> groups_;
  std::vector<std::uint32_t> order_;       // pairs grouped by expert, in their own order inside
  std::vector<std::uint32_t> pair_group_;  // per pair
  std::vector<std::uint8_t> answered_;     // per pair
  std::vector<WorkerIndex> answered_by_;   // per pair, where answered_; unused with sums
  std::vector<std::uint8_t> in_local_;     // per pair: in the batch taken last
  std::uint32_t remaining_ = 0;            // pairs without an answer
  std::vector<Request> requests_;
  std::size_t n_requests_ = 0;
  std::vector<std::uint32_t> unplaced_;    // groups nobody works on
  std::vector<std::uint32_t> local_groups_;
  std::size_t next_local_ = 0;
  std::vector<std::uint32_t> local_batch_, local_batch_groups_;
  std::vector<Doubt> doubts_;
  std::vector<SpotCheck> checks_;
  std::vector<std::uint32_t> asking_checks_;  // that need an opinion, by advance() or begin()
  std::vector<std::uint32_t> local_checks_;   // to compute here
  std::size_t next_local_check_ = 0;
  std::uint32_t n_open_checks_ = 0, n_slots_ = 0, local_check_ = 0;
  std::uint32_t n_parked_ = 0;
  TimePoint retry_at_{};
  std::optional<Error> failure_;
  std::vector<Report> reports_;
  RoundCounters counters_;

  FanOut fan_out_;
  std::optional<FanOutWay> way_;         // of this round, if it had the choice
  TimePoint placed_at_{}, last_answer_{};

  // Scratch for grouping and placing.
  std::vector<std::uint32_t> expert_slot_;   // expert -> group, valid where expert_stamp_ matches
  std::vector<std::uint64_t> expert_stamp_;
  std::vector<std::uint64_t> row_stamp_;
  std::vector<std::uint32_t> row_number_;
  std::uint64_t stamp_ = 0;
  std::vector<std::vector<std::uint32_t>> by_worker_;
  std::vector<std::uint32_t> pairs_on_worker_;
  std::vector<WorkerIndex> touched_;
  std::vector<std::uint32_t> placing_;
  struct Trial {
    WorkerIndex worker;
    std::vector<std::uint32_t> groups;
  };
  std::vector<Trial> trials_;
};

}  // namespace kvasir::dispatch
