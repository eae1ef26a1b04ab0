// Spot checks in the engine: who computes again, what is compared, who is blamed.
#include <gtest/gtest.h>

#include <map>
#include <utility>

#include "dispatch/core/round_engine.h"

namespace kvasir::dispatch {
namespace {

using namespace std::chrono_literals;

wire::LayerId layer_id() {
  wire::LayerId id{};
  id[0] = std::byte{1};
  return id;
}

wire::Holdings holds(std::uint32_t begin, std::uint32_t end) {
  wire::Holding entry{.layer_id = layer_id(), .layer = 1, .n_expert = 64, .n_embd = 4, .experts = {}};
  entry.experts.add({begin, end});
  return {{entry}};
}

// Rows are numbers: the right answer to a pair is its position + 100.
struct Checked : CheckedRows {
  explicit Checked(std::size_t n_workers, bool local, double share)
      : tuning([share] {
          Tuning t;
          t.spot_check = share;
          return t;
        }()),
        fleet(n_workers, tuning, 5), engine(n_workers, local, tuning) {
    for (WorkerIndex w = 0; w < n_workers; ++w) {
      fleet.on_connected(w, 1ms);
      fleet.on_holdings(w, holds(0, 16));
      engine.link_up(w);
      // Equally fast, so that each is asked.
      for (int i = 0; i < 64; ++i) fleet.apply({.kind = Report::Kind::kAnswer, .worker = w, .pairs = 1, .latency = 1ms}, now);
    }
  }
  void begin(std::vector<wire::Pair> p) {
    pairs = std::move(p);
    out.assign(pairs.size(), 0);
    ASSERT_TRUE(engine.begin(fleet, {.key = {layer_id()}, .layer = 1, .n_expert = 64, .n_rows = 4, .n_embd = 4,
                                     .request_rows_max = 1024, .request_pairs_max = 4096, .pairs = pairs}, now));
  }
  static int right(std::uint32_t pair) { return static_cast<int>(pair) + 100; }

  // Takes over the orders to send.
  std::vector<Request> sent() {
    std::vector<Request> orders;
    for (std::uint32_t i : std::exchange(engine.to_send, {})) orders.push_back(engine.request(i));
    return orders;
  }
  // A liar adds its own number to every answer.
  void answer(const Request& request) {
    slots.resize(engine.check_slots());
    (request.check == Request::kNoCheck ? asked : opinions)[request.worker] += request.pairs.size();
    const auto n = static_cast<std::uint32_t>(request.pairs.size());
    const auto value = [&](std::uint32_t i) { return right(request.pairs[i]) + lies[request.worker]; };
    engine.on_result(request.worker, request.id, {.n_embd = 4, .first_row = 0, .n_rows = n, .total_rows = n}, false, now,
                     [&](std::uint32_t i, std::uint32_t pair) {
                       out[pair] = value(i);
                       return RowState::kFinite;
                     },
                     [&](std::uint32_t i, std::uint32_t slot) {
                       slots[slot] = value(i);
                       return RowState::kFinite;
                     });
  }
  void answer_all() {
    while (!engine.to_send.empty()) {
      now += 1ms;
      for (const Request& request : sent()) answer(request);
      step();
    }
  }
  void step() {
    while (engine.has_local_check()) {
      std::uint32_t slot = 0;
      const auto taken = engine.take_local_check(slot);
      slots.resize(engine.check_slots());
      for (std::uint32_t pair : taken) slots[slot++] = right(pair);
      if (!taken.empty()) engine.check_computed(Nanos(0));
    }
    if (engine.has_checks_to_judge()) engine.judge_checks(*this);
    if (engine.needs_advance(now)) engine.advance(fleet, now);
  }
  void run() {
    answer_all();
    step();
    answer_all();
  }
  // The round is over and nothing wrong is left in it.
  void expect_right() {
    ASSERT_TRUE(engine.finished());
    ASSERT_TRUE(engine.end(fleet, now));
    for (std::uint32_t pair = 0; pair < out.size(); ++pair) EXPECT_EQ(out[pair], right(pair)) << pair;
  }

  bool answer_agrees(std::uint32_t pair, std::uint32_t slot) const override { return out[pair] == slots[slot]; }
  bool slots_agree(std::uint32_t a, std::uint32_t b) const override { return slots[a] == slots[b]; }
  void lie_found(const Evidence& evidence) override { accused.push_back(evidence.worker); }
  void replace_answer(std::uint32_t pair, std::uint32_t slot) override { out[pair] = slots[slot]; }

  const Tuning tuning;
  TimePoint now{1s};
  Fleet fleet;
  RoundEngine engine;
  std::vector<wire::Pair> pairs;
  std::vector<int> out, slots;
  std::map<WorkerIndex, int> lies;
  std::map<WorkerIndex, std::size_t> asked, opinions;
  std::vector<WorkerIndex> accused;
};

const std::vector<wire::Pair> kPairs = {{0, 1}, {0, 9}, {1, 9}, {1, 3}, {3, 1}};

TEST(CheckShare, IsLargerForNewWorkersAndForThoseCaught) {
  Tuning tuning;
  tuning.spot_check = 0.005;
  Reputation reputation;
  EXPECT_DOUBLE_EQ(check_share(reputation, tuning), 0.05);
  reputation.asked_in_standing = tuning.spot_new_pairs;
  EXPECT_DOUBLE_EQ(check_share(reputation, tuning), 0.005);
  reputation.offences = 2;
  EXPECT_DOUBLE_EQ(check_share(reputation, tuning), 0.05);
  reputation.asked_in_standing = 4 * tuning.spot_new_pairs;
  EXPECT_DOUBLE_EQ(check_share(reputation, tuning), 0.005);
  tuning.spot_check = 1;
  EXPECT_DOUBLE_EQ(check_share({}, tuning), 1);
  tuning.spot_check = 0;
  EXPECT_DOUBLE_EQ(check_share({}, tuning), 0);
}

TEST(LieQuarantine, DoublesFromAnHourToADay) {
  const Tuning tuning;
  EXPECT_EQ(lie_quarantine({.offences = 1}, tuning), 1h);
  EXPECT_EQ(lie_quarantine({.offences = 3}, tuning), 4h);
  EXPECT_EQ(lie_quarantine({.offences = 4000000000u}, tuning), 24h);
}

TEST(SpotCheck, ALieIsReplacedAndItsWorkerLeftAlone) {
  Checked c(1, true, 1.0);
  c.lies[0] = 1;
  c.begin(kPairs);
  c.run();
  c.expect_right();
  EXPECT_EQ(c.fleet.state(0), WorkerState::kQuarantined);
  EXPECT_EQ(c.fleet.reputation(0).offences, 1u);
  EXPECT_EQ(c.engine.counters().pairs_wrong, 5u);
  // Neither a lesser fault nor a new connection shortens it.
  c.fleet.apply({.kind = Report::Kind::kInvalid, .worker = 0}, c.now);
  c.fleet.on_lost(0, c.now);
  c.fleet.on_connected(0, 1ms);
  EXPECT_EQ(c.fleet.usable(0, c.now + 59min), Usable::kNo);
  EXPECT_NE(c.fleet.usable(0, c.now + 61min), Usable::kNo);
}

TEST(SpotCheck, AnHonestAnswerStandsAndIsCounted) {
  Checked c(1, true, 1.0);
  c.begin(kPairs);
  c.run();
  c.expect_right();
  EXPECT_EQ(c.engine.counters().pairs_verified, 5u);
  EXPECT_EQ(c.fleet.reputation(0).pairs_verified, 5u);
  EXPECT_EQ(c.fleet.state(0), WorkerState::kUp);
}

TEST(SpotCheck, TheRoundWaitsForItsChecks) {
  Checked c(1, true, 1.0);
  c.begin(kPairs);
  c.answer(c.sent().at(0));
  EXPECT_FALSE(c.engine.finished());
  c.step();
  c.expect_right();
}

TEST(SpotCheck, WithoutALocalReplicaAThirdWorkerJudges) {
  for (const WorkerIndex liar : {0u, 1u, 2u}) {
    Checked c(3, false, 1.0);
    c.lies[liar] = 7;
    for (int round = 0; round < 20 && c.accused.empty(); ++round) {
      c.begin({{0, static_cast<std::uint32_t>(round % 16)}});
      c.run();
      c.expect_right();
    }
    ASSERT_FALSE(c.accused.empty());
    for (const WorkerIndex w : c.accused) EXPECT_EQ(w, liar);
    for (WorkerIndex w = 0; w < 3; ++w) EXPECT_EQ(c.fleet.reputation(w).offences, w == liar ? 1u : 0u);
    EXPECT_EQ(c.engine.counters().checks_undecided, 0u);
  }
}

TEST(SpotCheck, OfTwoThatDisagreeNobodyIsBlamedWithoutAJudge) {
  Checked c(2, false, 1.0);
  c.lies[1] = 7;
  c.begin({{0, 1}});
  c.run();
  ASSERT_TRUE(c.engine.finished());
  ASSERT_TRUE(c.engine.end(c.fleet, c.now));
  EXPECT_TRUE(c.accused.empty());
  EXPECT_EQ(c.engine.counters().checks_undecided, 1u);
  EXPECT_EQ(c.engine.counters().pairs_wrong, 0u);
}

TEST(SpotCheck, WithNobodyToAskTheRoundGoesOn) {
  Checked c(1, false, 1.0);
  c.begin(kPairs);
  c.run();
  c.expect_right();
  EXPECT_EQ(c.engine.counters().checks_unanswered, 3u);  // experts
}

TEST(SpotCheck, ASecondOpinionThatIsLateOrLostHoldsNobodyUp) {
  for (const bool lost : {true, false}) {
    Checked c(2, false, 1.0);
    c.begin({{0, 1}});
    const std::vector<Request> sent = c.sent();
    ASSERT_EQ(sent.size(), 2u);
    const Request& first = sent[0];
    const Request& opinion = sent[1];
    EXPECT_NE(opinion.check, Request::kNoCheck);
    EXPECT_NE(first.worker, opinion.worker);
    c.answer(first);
    EXPECT_FALSE(c.engine.finished());
    if (lost) c.engine.link_down(opinion.worker);
    else c.now = c.engine.next_wake();
    c.step();
    c.expect_right();
    EXPECT_EQ(c.engine.counters().checks_unanswered, 1u);
    EXPECT_EQ(c.fleet.reputation(opinion.worker).offences, 0u);
  }
}

// A worker that stands still was asked for a second opinion, and the round of the other one's answer
// was held up for a second, where an answer of its own would have been asked for elsewhere after 4 ms.
TEST(SpotCheck, OneOfASampleHoldsTheRoundUpNoLongerThanToItsFirstDeadline) {
  for (const double share : {0.5, 1.0}) {  // new workers are checked ten times as often: both draw every check
    Checked c(2, false, share);
    c.begin({{0, 1}});
    const std::vector<Request> sent = c.sent();
    ASSERT_EQ(sent.size(), 2u);
    ASSERT_NE(sent[1].check, Request::kNoCheck);
    c.answer(sent[0]);
    c.now = sent[1].hedge_at;
    ASSERT_LT(sent[1].hedge_at, sent[1].final_at);
    c.step();
    // With a share of 1 no answer passes unseen while there is hope.
    EXPECT_EQ(c.engine.finished(), share < 1);
    c.now = sent[1].final_at;
    c.step();
    c.expect_right();
    EXPECT_EQ(c.engine.counters().checks_unanswered, 1u);

    // Nor is the next round: nobody asks one that is late for samples.
    if (share < 1) {
      c.begin({{0, 1}});
      EXPECT_EQ(c.engine.to_send.size(), 1u);
      EXPECT_EQ(c.engine.request(c.engine.to_send[0]).worker, sent[0].worker);
      c.run();
      c.expect_right();
    }
  }
}

TEST(SpotCheck, ADisagreementIsWaitedForUntilTheSecondDeadline) {
  Checked c(3, false, 0.5);
  c.begin({{0, 1}});
  const std::vector<Request> sent = c.sent();
  ASSERT_EQ(sent.size(), 2u);
  c.lies[sent[0].worker] = 5;
  c.answer(sent[0]);
  c.answer(sent[1]);
  c.step();
  const std::vector<Request> judges = c.sent();
  ASSERT_EQ(judges.size(), 1u);
  c.now = judges[0].hedge_at;
  c.step();
  ASSERT_FALSE(c.engine.finished());
  c.answer(judges[0]);
  c.step();
  c.expect_right();
  EXPECT_EQ(c.accused, std::vector<WorkerIndex>{sent[0].worker});
}

TEST(SpotCheck, WhenALiarIsCaughtTheRestOfItsRoundIsCheckedToo) {
  // A share so small that only the check planted below takes place.
  Checked c(1, true, 1e-9);
  c.begin({{0, 1}, {0, 2}, {0, 3}, {0, 4}});
  EXPECT_EQ(c.engine.check_slots(), 0u);
  c.engine.check_expert_of(2);
  c.lies[0] = 3;
  c.run();
  c.step();
  c.step();
  c.expect_right();
  EXPECT_EQ(c.engine.counters().pairs_wrong, 4u);
  EXPECT_EQ(c.fleet.reputation(0).offences, 1u);
}

TEST(SpotCheck, ZeroChecksNothing) {
  Checked c(1, true, 0.0);
  c.lies[0] = 1;
  c.begin(kPairs);
  c.run();
  ASSERT_TRUE(c.engine.finished());
  EXPECT_EQ(c.engine.check_slots(), 0u);
  ASSERT_TRUE(c.engine.end(c.fleet, c.now));
  EXPECT_EQ(c.fleet.state(0), WorkerState::kUp);
}

}  // namespace
}  // namespace kvasir::dispatch
