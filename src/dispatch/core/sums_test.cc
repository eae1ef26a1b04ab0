// Weighted sums: whatever is late, lost, double or wrong, each pair is counted once.
#include <gtest/gtest.h>

#include "dispatch/core/test_cluster.h"

namespace kvasir::dispatch {
namespace {

using namespace testing;

void expect_each_once(Cluster& c) {
  ASSERT_TRUE(c.engine.finished());
  const Status status = c.engine.end(c.fleet, c.now);
  EXPECT_TRUE(status) << status.error().message;
  EXPECT_EQ(c.written, std::vector<int>(c.pairs.size(), 1));
  EXPECT_EQ(c.engine.counters().pairs_remote + c.engine.counters().pairs_local, c.pairs.size());
}

TEST(Sums, OneRowComesBackForEachRowSent) {
  Cluster c(1);
  c.up(0, holds(0, 16));
  ASSERT_TRUE(c.begin_sums(kTwoRows));
  const Request request = c.sent().at(0);
  EXPECT_EQ(request.rows, (std::vector<std::uint32_t>{0, 1, 3}));
  EXPECT_EQ(request.answer_rows(), 3u);
  EXPECT_EQ(request.weights.size(), 5u);
  // In two frames, cut between rows.
  EXPECT_EQ(c.answer_sums(request, 0, 1), Verdict::kTaken);
  EXPECT_FALSE(c.engine.finished());
  EXPECT_EQ(c.answer_sums(request, 1, 2), Verdict::kTaken);
  expect_each_once(c);
}

TEST(Sums, AnAnswerPerPairIsTheWrongShape) {
  Cluster c(1);
  c.up(0, holds(0, 16));
  ASSERT_TRUE(c.begin_sums(kTwoRows));
  const Request request = c.sent().at(0);
  EXPECT_EQ(c.engine.on_result(0, request.id, {.row_type = wire::RowType::kF16, .n_embd = 4, .n_rows = 5, .total_rows = 5}, false, c.now,
                               [](std::uint32_t, std::uint32_t) { return RowState::kFinite; }),
            Verdict::kInvalid);
}

// A hedge splits a late request over two replicas; one of them answers, then the late one.
struct HedgedInTwo : Cluster {
  HedgedInTwo() : Cluster(3) {
    up(0, holds(0, 16));
    measure(0, 10ms);
    EXPECT_TRUE(begin_sums({{0, 1}, {0, 9}}));
    late = sent().at(0);
    up(1, holds(0, 8));
    up(2, holds(8, 16));
    measure(1, 10ms);
    measure(2, 10ms);
    step(50ms);
    hedges = sent();
    EXPECT_EQ(hedges.size(), 2u);
  }
  Request late;
  std::vector<Request> hedges;
};

TEST(Sums, AHedgeThenTheLateAnswerCountsNoPairTwice) {
  HedgedInTwo c;
  EXPECT_EQ(c.answer_sums(c.hedges[0]), Verdict::kTaken);
  EXPECT_EQ(c.answer_sums(c.late), Verdict::kTaken);  // holds a pair that is counted already: dropped as a whole
  EXPECT_EQ(c.engine.counters().sums_dropped, 1u);
  EXPECT_FALSE(c.engine.finished());
  EXPECT_EQ(c.answer_sums(c.hedges[1]), Verdict::kTaken);
  expect_each_once(c);
}

TEST(Sums, TheLateAnswerFirstMakesTheHedgesVain) {
  HedgedInTwo c;
  EXPECT_EQ(c.answer_sums(c.late), Verdict::kTaken);
  ASSERT_TRUE(c.engine.finished());
  EXPECT_EQ(c.answer_sums(c.hedges[0]), Verdict::kTaken);
  EXPECT_EQ(c.engine.counters().sums_dropped, 0u);
  expect_each_once(c);
}

TEST(Sums, WhatADroppedSumAloneWouldHaveBroughtIsAskedForAgain) {
  HedgedInTwo c;
  EXPECT_EQ(c.answer_sums(c.hedges[0]), Verdict::kTaken);
  c.engine.link_down(c.hedges[1].worker);
  EXPECT_EQ(c.answer_sums(c.late), Verdict::kTaken);
  EXPECT_FALSE(c.engine.finished());
  c.step(0ms);
  const auto again = c.sent();
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].worker, 0u);  // it answered well: dropping its sum was no fault of its
  EXPECT_EQ(again[0].pairs.size(), 1u);
  EXPECT_EQ(c.answer_sums(again[0]), Verdict::kTaken);
  expect_each_once(c);
}

TEST(Sums, OnlyMissingRowsOfAnExpertAreAskedForAgain) {
  Cluster c(2);
  c.up(0, holds(0, 16));
  ASSERT_TRUE(c.begin_sums(kTwoRows));
  const Request first = c.sent().at(0);
  EXPECT_EQ(c.answer_sums(first, 0, 1), Verdict::kTaken);  // row 0, then its connection ends
  c.up(1, holds(0, 16));
  c.engine.link_down(0);
  c.step(0ms);
  const auto again = c.sent();
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].rows, (std::vector<std::uint32_t>{1, 3}));
  EXPECT_EQ(again[0].pairs.size(), 3u);
  EXPECT_EQ(c.answer_sums(again[0]), Verdict::kTaken);
  expect_each_once(c);
}

TEST(Sums, LocalComputeTakesOnlyWhatIsMissing) {
  Cluster c(1);
  c.up(0, holds(0, 16));
  ASSERT_TRUE(c.begin_sums(kTwoRows));
  EXPECT_EQ(c.answer_sums(c.sent().at(0), 0, 1), Verdict::kTaken);
  c.engine.link_down(0);
  c.step(0ms);
  ASSERT_TRUE(c.engine.has_local());
  c.run_local();
  expect_each_once(c);
  EXPECT_EQ(c.engine.counters().pairs_local, 3u);
}

TEST(Sums, AnOverflowIsAskedForInF32WhereNothingIsComputedHere) {
  Cluster c(1, false);
  c.up(0, holds(0, 16));
  ASSERT_TRUE(c.begin_sums(kTwoRows));
  EXPECT_EQ(c.answer_sums(c.sent().at(0), RowState::kInfinite), Verdict::kTaken);
  c.step(0ms);
  const auto again = c.sent();
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].worker, 0u);
  EXPECT_EQ(again[0].row_type, wire::RowType::kF32);
  EXPECT_EQ(again[0].result_type, wire::RowType::kF32);
  EXPECT_EQ(c.answer_sums(again[0]), Verdict::kTaken);
  expect_each_once(c);
  EXPECT_EQ(c.engine.counters().invalid_answers, 0u);
}

TEST(Sums, AnOverflowIsComputedHereAndNobodyIsBlamed) {
  Cluster c(1);
  c.up(0, holds(0, 16));
  ASSERT_TRUE(c.begin_sums(kTwoRows));
  EXPECT_EQ(c.answer_sums(c.sent().at(0), RowState::kInfinite), Verdict::kTaken);
  c.step(0ms);
  c.run_local();
  expect_each_once(c);
  EXPECT_EQ(c.engine.counters().invalid_answers, 0u);
}

TEST(Sums, NanWhereTheTruthIsFiniteIsBlamedOnce) {
  for (const wire::RowType type : {wire::RowType::kF32, wire::RowType::kF16}) {
    Cluster c(1);
    c.up(0, holds(0, 16));
    ASSERT_TRUE(c.begin_sums(kTwoRows, type));
    EXPECT_EQ(c.answer_sums(c.sent().at(0), RowState::kNan), Verdict::kTaken);
    c.step(0ms);
    c.run_local();
    expect_each_once(c);
    EXPECT_EQ(c.engine.counters().invalid_answers, 1u);
    EXPECT_EQ(c.fleet.state(0), WorkerState::kQuarantined);
  }
}

TEST(Sums, HonestNanIsExcused) {
  Cluster c(1);
  c.up(0, holds(0, 16));
  ASSERT_TRUE(c.begin_sums(kTwoRows, wire::RowType::kF32));
  EXPECT_EQ(c.answer_sums(c.sent().at(0), RowState::kNan), Verdict::kTaken);
  c.step(0ms);
  c.run_local(/*finite=*/false);
  expect_each_once(c);
  EXPECT_EQ(c.engine.counters().invalid_answers, 0u);
}

TEST(Sums, EachWorkerHasItsOwnRowType) {
  Cluster c(2);
  c.up(0, holds(0, 8));
  c.up(1, holds(8, 16));
  const std::vector<wire::RowType> types = {wire::RowType::kF32, wire::RowType::kF16};
  c.pairs = kTwoRows;
  c.written.assign(5, 0);
  c.weights.assign(5, 1.0f);
  ASSERT_TRUE(c.engine.begin(c.fleet, {.key = {layer_id(1)}, .layer = 1, .n_expert = 64, .n_rows = 4, .n_embd = 4, .worker_types = types,
                                       .request_rows_max = 1024, .request_pairs_max = 4096, .pairs = c.pairs, .weights = c.weights}, c.now));
  for (const Request& request : c.sent()) {
    EXPECT_EQ(request.row_type, types[request.worker]);
    EXPECT_EQ(c.answer_sums(request), Verdict::kTaken);
  }
  expect_each_once(c);
}

}  // namespace
}  // namespace kvasir::dispatch
