#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "dispatch/core/test_cluster.h"

namespace kvasir::dispatch {
namespace {

using namespace testing;

using namespace std::chrono_literals;

TEST(LatencyModel, PredictsWhatItSawAndInterpolates) {
  LatencyModel model;
  EXPECT_FALSE(model.predict(8).measured);
  for (int i = 0; i < 20; ++i) {
    model.observe(8, 1ms);
    model.observe(1024, 100ms);
  }
  EXPECT_TRUE(model.predict(8).measured);
  EXPECT_NEAR(static_cast<double>(model.predict(8).expected.count()), 1e6, 1e3);
  EXPECT_NEAR(static_cast<double>(model.predict(1024).expected.count()), 100e6, 1e5);
  EXPECT_GT(model.predict(512).expected, 40ms);
  EXPECT_LT(model.predict(512).expected, 60ms);
  // Ten times the largest size seen is a guess again, but one that grows with the size.
  EXPECT_FALSE(model.predict(10240).measured);
  EXPECT_GT(model.predict(10240).expected, 900ms);
}

TEST(LatencyModel, OneStallDoesNotLoosenPredictionsMuch) {
  LatencyModel model;
  for (int i = 0; i < 50; ++i) model.observe(8, 1ms);
  model.observe(8, 10s);
  EXPECT_LT(model.predict(8).expected, 2ms);
  // A worker that has become slow is believed after some answers.
  for (int i = 0; i < 60; ++i) model.observe(8, 50ms);
  EXPECT_GT(model.predict(8).expected, 45ms);
}

TEST(LatencyModel, RatioQuantileIsAnUpperEstimate) {
  LatencyModel model;
  EXPECT_EQ(model.ratio_quantile(0.95), LatencyModel::kRatioUnknown);
  Rng rng(1);
  for (int i = 0; i < 2000; ++i) model.observe(8, Nanos(static_cast<std::int64_t>(1e6 * (0.5 + rng.unit()))));
  EXPECT_GE(model.ratio_quantile(0.95), 1.40);  // uniform over [0.5, 1.5] of the mean: 1.45
  EXPECT_LE(model.ratio_quantile(0.95), 1.80);
  EXPECT_LE(model.ratio_quantile(0.5), 1.25);
}

TEST(RouteTable, ListsReplicasAndMergesSlicesOfOneWorker) {
  wire::Holdings two = holds(0, 2);
  two.entries.push_back(holds(1, 5).entries[0]);
  const std::shared_ptr<const wire::Holdings> holdings[] = {std::make_shared<wire::Holdings>(two), nullptr,
                                                            std::make_shared<wire::Holdings>(holds(4, 6))};
  const RouteTable table(holdings);
  const LayerRoutes* routes = table.find({layer_id(1)});
  ASSERT_NE(routes, nullptr);
  EXPECT_EQ(table.find({layer_id(2)}), nullptr);
  EXPECT_EQ(table.find({layer_id(1), wire::ExpertGroup::kChexps}), nullptr);
  EXPECT_EQ(routes->replicas(0).size(), 1u);
  EXPECT_EQ(routes->replicas(1).size(), 1u);
  ASSERT_EQ(routes->replicas(4).size(), 2u);
  EXPECT_EQ(routes->replicas(4)[1], 2u);
  EXPECT_TRUE(routes->replicas(63).empty());
  EXPECT_TRUE(routes->replicas(4000000000u).empty());
}

TEST(Fleet, BackoffGrowsWithJitterAndEndsWithSuccess) {
  Fleet fleet(1, {}, 7);
  TimePoint now{};
  Nanos last{};
  for (int i = 0; i < 12; ++i) {
    ASSERT_TRUE(fleet.next_attempt(0));
    now = std::max(now, *fleet.next_attempt(0));
    fleet.on_connecting(0);
    EXPECT_FALSE(fleet.next_attempt(0));
    fleet.on_lost(0, now);
    last = *fleet.next_attempt(0) - now;
    EXPECT_GE(last, Tuning{}.backoff_first / 2);
    EXPECT_LE(last, Tuning{}.backoff_max);
  }
  EXPECT_GE(last, Tuning{}.backoff_max / 2);
  fleet.on_connected(0, 1ms);
  EXPECT_EQ(fleet.failures(0), 0u);
  EXPECT_EQ(fleet.usable(0, now), Usable::kYes);
  fleet.on_refused(0, now);
  EXPECT_GE(*fleet.next_attempt(0) - now, Tuning{}.refused_backoff / 2);
}

TEST(Fleet, QuarantineOutlastsARestartAndEndsInProbation) {
  Fleet fleet(1, {}, 7);
  TimePoint now{};
  fleet.on_connected(0, 1ms);
  EXPECT_TRUE(fleet.apply({.kind = Report::Kind::kInvalid, .worker = 0}, now));
  EXPECT_EQ(fleet.usable(0, now), Usable::kNo);
  fleet.on_lost(0, now);
  fleet.on_connecting(0);
  fleet.on_connected(0, 1ms);
  EXPECT_EQ(fleet.usable(0, now), Usable::kNo);
  now += Tuning{}.quarantine_first;
  int avoided = 0;
  for (int i = 0; i < 160; ++i) avoided += fleet.usable(0, now) == Usable::kAvoid;
  EXPECT_GT(avoided, 120);  // chosen about one time in 16
  for (std::uint32_t i = 0; i < Tuning{}.probation_answers; ++i) fleet.apply({.kind = Report::Kind::kAnswer, .worker = 0, .pairs = 8, .latency = 1ms}, now);
  EXPECT_EQ(fleet.usable(0, now), Usable::kYes);
}

TEST(Fleet, SlotsAreGivenOutAgainAndQuarantineMovesHouseWithItsWorker) {
  Fleet fleet(0, {}, 7);
  TimePoint now{};
  const WorkerIndex first = fleet.add(), second = fleet.add();
  EXPECT_EQ(fleet.size(), 2u);
  for (const WorkerIndex w : {first, second}) {
    fleet.on_connected(w, 1ms);
    fleet.on_holdings(w, holds(0, 2));
  }
  EXPECT_EQ(fleet.routes()->find({layer_id(1)})->replicas(0).size(), 2u);
  fleet.remove(first);
  EXPECT_EQ(fleet.routes()->find({layer_id(1)})->replicas(0).size(), 1u);
  EXPECT_EQ(fleet.usable(first, now), Usable::kNo);
  EXPECT_FALSE(fleet.next_attempt(first));
  // What it still answers is taken, and bad answers of it change no state.
  fleet.on_sent(first, 8);
  EXPECT_FALSE(fleet.apply({.kind = Report::Kind::kInvalid, .worker = first}, now));
  fleet.apply({.kind = Report::Kind::kAnswer, .worker = first, .pairs = 8, .rows = 3, .latency = 1ms}, now);
  EXPECT_EQ(fleet.state(first), WorkerState::kRemoved);
  const Service service = fleet.take_service(first);
  EXPECT_EQ(service.pairs, 8u);
  EXPECT_EQ(service.rows, 3u);
  EXPECT_TRUE(fleet.take_service(first).empty());
  EXPECT_EQ(fleet.add(), 2u);  // not released yet
  fleet.release(first);
  EXPECT_EQ(fleet.add(), first);
  EXPECT_EQ(fleet.state(first), WorkerState::kDown);

  EXPECT_TRUE(fleet.apply({.kind = Report::Kind::kInvalid, .worker = second}, now));
  fleet.remove(second);
  const WorkerIndex elsewhere = fleet.add(second);
  fleet.on_connected(elsewhere, 1ms);
  EXPECT_EQ(fleet.usable(elsewhere, now), Usable::kNo);
  now += Tuning{}.quarantine_first;
  EXPECT_NE(fleet.usable(elsewhere, now), Usable::kNo);
}

TEST(Fleet, DeadlinesScaleWithPairsAndStayInBounds) {
  Fleet fleet(1, {}, 7);
  fleet.on_connected(0, 1ms);
  const TimePoint now{};
  // Unmeasured: generous, and more so for a long prompt.
  EXPECT_GE(fleet.deadlines(0, 8, now).final, 2s);
  EXPECT_GE(fleet.deadlines(0, 4096, now).final, 40s);
  EXPECT_LE(fleet.deadlines(0, 1u << 20, now).final, Tuning{}.deadline_ceiling);
  for (int i = 0; i < 100; ++i) {
    fleet.apply({.kind = Report::Kind::kAnswer, .worker = 0, .pairs = 8, .latency = 10ms}, now);
    fleet.apply({.kind = Report::Kind::kAnswer, .worker = 0, .pairs = 4096, .latency = 4s}, now);
  }
  const Fleet::Deadlines small = fleet.deadlines(0, 8, now);
  EXPECT_LE(small.hedge, 30ms);  // a hedge at a 10 ms round starts within 30 ms
  EXPECT_GE(small.final, Tuning{}.final_floor);
  const Fleet::Deadlines large = fleet.deadlines(0, 4096, now);
  EXPECT_GE(large.hedge, 4s);
  EXPECT_GE(large.final, 8s);
}

// A long prompt that waits there weighs more than a row does.
TEST(Fleet, AWorkersOwnPredictionOfItsQueueSteersTheChoice) {
  Fleet fleet(2, {}, 7);
  const TimePoint now{};
  for (const WorkerIndex w : {0u, 1u}) {
    fleet.on_connected(w, 1ms);
    for (int i = 0; i < 50; ++i)
      for (const std::uint32_t pairs : {1u, 8u}) fleet.apply({.kind = Report::Kind::kAnswer, .worker = w, .pairs = pairs, .latency = 1ms * pairs}, now);
  }
  fleet.on_pong(0, {.queued = 1, .wait_us = 700'000, .row_us = 1000}, 1ms, now);
  fleet.on_pong(1, {.queued = 3, .row_us = 1000}, 1ms, now);  // has measured nothing: three of one pair
  EXPECT_GE(fleet.predicted_finish(0, 8, now), 700ms);
  EXPECT_LE(fleet.predicted_finish(1, 8, now), 20ms);
  EXPECT_TRUE(fleet.is_busy(0, 8, now));
  // It is believed within limits, and not without a request that waits.
  fleet.on_pong(0, {.queued = 1, .wait_us = UINT32_MAX}, 1ms, now);
  EXPECT_LE(fleet.predicted_finish(0, 8, now), Tuning{}.deadline_ceiling + 1s);
  fleet.on_pong(0, {.queued = 0, .wait_us = 700'000}, 1ms, now);
  EXPECT_FALSE(fleet.is_busy(0, 8, now));
}

TEST(RoundEngine, SendsEachNeededRowOnceAndKeepsAnExpertTogether) {
  Cluster c(2);
  c.up(0, holds(0, 8));
  c.up(1, holds(8, 16));
  ASSERT_TRUE(c.begin(kTwoRows));
  auto sent = c.sent();
  ASSERT_EQ(sent.size(), 2u);
  if (sent[0].worker == 1) std::swap(sent[0], sent[1]);
  EXPECT_EQ(sent[0].rows, (std::vector<std::uint32_t>{0, 1, 3}));
  EXPECT_EQ(sent[0].wire_pairs, (std::vector<wire::Pair>{{0, 1}, {2, 1}, {1, 3}}));
  EXPECT_EQ(sent[1].rows, (std::vector<std::uint32_t>{0, 1}));
  EXPECT_EQ(sent[1].pairs, (std::vector<std::uint32_t>{1, 2}));
  EXPECT_FALSE(c.engine.finished());
  EXPECT_EQ(c.answer(sent[0]), Verdict::kTaken);
  EXPECT_EQ(c.answer(sent[1]), Verdict::kTaken);
  ASSERT_TRUE(c.engine.finished());
  EXPECT_TRUE(c.engine.end(c.fleet, c.now));
  EXPECT_EQ(c.written, std::vector<int>(5, 1));
  EXPECT_EQ(c.engine.counters().pairs_remote, 5u);
  EXPECT_EQ(c.fleet.outstanding_pairs(0), 0u);
}

TEST(RoundEngine, RefusesPairsOutOfRange) {
  Cluster c(1);
  EXPECT_FALSE(c.begin({{0, 64}}));
  EXPECT_FALSE(c.begin({{4, 1}}));
}

TEST(RoundEngine, ExpertsNobodyHoldsAreLocalAtOnce) {
  Cluster c(1);
  c.up(0, holds(0, 8));
  ASSERT_TRUE(c.begin(kTwoRows));
  EXPECT_TRUE(c.engine.has_local());
  c.run_local();
  EXPECT_FALSE(c.engine.finished());
  EXPECT_EQ(c.answer(c.sent().at(0)), Verdict::kTaken);
  EXPECT_TRUE(c.engine.finished());
  EXPECT_EQ(c.engine.counters().pairs_local, 2u);
}

TEST(RoundEngine, ALostLinkMovesItsExpertsAtOnce) {
  Cluster c(2);
  c.up(0, holds(0, 16));
  ASSERT_TRUE(c.begin(kTwoRows));
  c.up(1, holds(0, 16));
  c.sent();
  c.engine.link_down(0);
  c.step(0ms);
  const auto again = c.sent();
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].worker, 1u);
  EXPECT_EQ(again[0].pairs.size(), 5u);
  c.engine.link_down(1);
  c.step(0ms);
  EXPECT_TRUE(c.sent().empty());
  c.run_local();
  EXPECT_TRUE(c.engine.finished());
  EXPECT_TRUE(c.engine.end(c.fleet, c.now));
  EXPECT_EQ(c.engine.outstanding(), 0u);
  EXPECT_EQ(c.fleet.outstanding_pairs(0) + c.fleet.outstanding_pairs(1), 0u);
}

TEST(RoundEngine, HedgesPastTheFirstDeadlineAndDropsTheLateAnswer) {
  Cluster c(2);
  c.up(0, holds(0, 16));
  c.measure(0, 10ms);
  ASSERT_TRUE(c.begin(kTwoRows));
  const Request slow = c.sent().at(0);
  c.up(1, holds(0, 16));
  c.measure(1, 10ms);
  c.step(50ms);
  const auto hedges = c.sent();
  ASSERT_EQ(hedges.size(), 1u);
  EXPECT_TRUE(hedges[0].is_hedge);
  EXPECT_EQ(hedges[0].worker, 1u);
  EXPECT_EQ(c.answer(hedges[0]), Verdict::kTaken);
  ASSERT_TRUE(c.engine.finished());
  EXPECT_TRUE(c.engine.end(c.fleet, c.now));
  ASSERT_EQ(c.engine.to_cancel.size(), 1u);
  EXPECT_EQ(c.engine.to_cancel[0].id, slow.id);
  // The stalled one is not chosen again while another replica is there.
  for (int i = 0; i < 8; ++i) {
    ASSERT_TRUE(c.begin(kTwoRows));
    const auto sent = c.sent();
    ASSERT_EQ(sent.size(), 1u);
    EXPECT_EQ(sent[0].worker, 1u);
    c.answer(sent[0]);
    ASSERT_TRUE(c.engine.end(c.fleet, c.now));
  }
  EXPECT_EQ(c.answer(slow), Verdict::kLate);
  EXPECT_EQ(c.answer(slow), Verdict::kUnknown);
  EXPECT_EQ(c.engine.counters().late_answers, 1u);
}

TEST(RoundEngine, HedgeBudgetIsKept) {
  Tuning tuning;
  tuning.hedge_burst = 2;
  Cluster c(2, true, tuning);
  c.up(0, holds(0, 16));
  c.up(1, holds(0, 16));
  c.measure(0, 1ms);
  c.measure(1, 1ms);
  for (int i = 0; i < 200; ++i) {
    ASSERT_TRUE(c.begin(kTwoRows));
    auto sent = c.sent();
    c.step(20ms);
    for (const Request& hedge : c.sent()) sent.push_back(hedge);
    for (const Request& request : sent) c.answer(request);
    while (!c.engine.finished()) c.run_local();
    ASSERT_TRUE(c.engine.end(c.fleet, c.now));
  }
  const RoundCounters& n = c.engine.counters();
  EXPECT_GT(n.hedges, 2u);
  EXPECT_LE(static_cast<double>(n.hedges), 2 + 0.05 * static_cast<double>(n.requests - n.hedges) + 1);
  EXPECT_GT(n.hedges_denied, 0u);
}

TEST(RoundEngine, AStalledWorkerIsPaidForOnce) {
  Cluster c(1);
  c.up(0, holds(0, 16));
  c.measure(0, 10ms);
  ASSERT_TRUE(c.begin(kTwoRows));
  const Request slow = c.sent().at(0);
  c.step(2s);
  c.step(0s);
  ASSERT_TRUE(c.engine.has_local());
  c.run_local();
  ASSERT_TRUE(c.engine.finished());
  ASSERT_TRUE(c.engine.end(c.fleet, c.now));
  // The next round does not wait for it, and after a while its link is replaced.
  ASSERT_TRUE(c.begin(kTwoRows));
  EXPECT_TRUE(c.sent().empty());
  c.run_local();
  ASSERT_TRUE(c.engine.end(c.fleet, c.now));
  c.now += 3s;
  ASSERT_TRUE(c.begin(kTwoRows));
  EXPECT_EQ(c.engine.to_drop, std::vector<WorkerIndex>{0});
  c.run_local();
  ASSERT_TRUE(c.engine.end(c.fleet, c.now));
  // A late answer shows that it lives.
  EXPECT_EQ(c.answer(slow), Verdict::kLate);
  ASSERT_TRUE(c.begin(kTwoRows));
  EXPECT_EQ(c.sent().size(), 1u);
}

TEST(RoundEngine, ShapeErrorsQuarantine) {
  Cluster c(1);
  c.up(0, holds(0, 16));
  ASSERT_TRUE(c.begin(kTwoRows));
  EXPECT_EQ(c.answer(c.sent().at(0), true, 5), Verdict::kInvalid);
  EXPECT_EQ(c.written, std::vector<int>(5, 0));
  c.engine.link_down(0);
  c.step(0ms);
  EXPECT_EQ(c.engine.quarantined, std::vector<WorkerIndex>{0});
  c.run_local();
  ASSERT_TRUE(c.engine.end(c.fleet, c.now));
  EXPECT_EQ(c.fleet.state(0), WorkerState::kQuarantined);
}

TEST(RoundEngine, NotFiniteIsRecomputedAndBlamedOnlyIfTheLocalAnswerIsFinite) {
  for (const bool local_finite : {true, false}) {
    Cluster c(1);
    c.up(0, holds(0, 16));
    ASSERT_TRUE(c.begin(kTwoRows));
    EXPECT_EQ(c.answer(c.sent().at(0), false), Verdict::kTaken);
    c.step(0ms);
    ASSERT_TRUE(c.engine.has_local());
    c.run_local(local_finite);
    ASSERT_TRUE(c.engine.finished());
    ASSERT_TRUE(c.engine.end(c.fleet, c.now));
    EXPECT_EQ(c.fleet.state(0), local_finite ? WorkerState::kQuarantined : WorkerState::kUp);
  }
}

TEST(RoundEngine, NeverWaitsForAReplicaThenFailsNamingLayerAndExperts) {
  Cluster c(1, false);
  ASSERT_TRUE(c.begin(kTwoRows));
  EXPECT_FALSE(c.engine.finished());
  c.step(5s);
  EXPECT_FALSE(c.engine.finished());
  // One comes back: the round goes on.
  c.up(0, holds(8, 16));
  c.step(100ms);
  const auto sent = c.sent();
  ASSERT_EQ(sent.size(), 1u);
  c.answer(sent[0]);
  c.step(6s);
  ASSERT_TRUE(c.engine.finished());
  const Status status = c.engine.end(c.fleet, c.now);
  ASSERT_FALSE(status);
  EXPECT_NE(status.error().message.find("layer 1"), std::string::npos);
  EXPECT_NE(status.error().message.find("experts 1,3"), std::string::npos) << status.error().message;
  // And the next round works again.
  c.engine.link_down(0);
  c.up(0, holds(0, 16));
  ASSERT_TRUE(c.begin(kTwoRows));
  c.answer(c.sent().at(0));
  ASSERT_TRUE(c.engine.finished());
  EXPECT_TRUE(c.engine.end(c.fleet, c.now));
}

TEST(RoundEngine, BusyGoesElsewhereAndDrainingStopsNewWork) {
  Cluster c(2);
  c.up(0, holds(0, 16));
  c.up(1, holds(0, 16));
  ASSERT_TRUE(c.begin({{0, 1}}));
  const Request first = c.sent().at(0);
  EXPECT_EQ(c.engine.on_error(first.worker, first.id, wire::ErrorCode::kDraining, c.now), Verdict::kTaken);
  c.step(0ms);
  const Request second = c.sent().at(0);
  EXPECT_NE(second.worker, first.worker);
  EXPECT_EQ(c.engine.on_error(second.worker, second.id, wire::ErrorCode::kBusy, c.now), Verdict::kTaken);
  c.step(0ms);
  ASSERT_TRUE(c.engine.has_local());
  c.run_local();
  ASSERT_TRUE(c.engine.end(c.fleet, c.now));
  EXPECT_EQ(c.fleet.state(first.worker), WorkerState::kDraining);
  EXPECT_EQ(c.fleet.state(second.worker), WorkerState::kUp);
}

TEST(RoundEngine, CutsRequestsAtTheRowLimitBetweenExperts) {
  Cluster c(1);
  c.up(0, holds(0, 64));
  std::vector<wire::Pair> pairs;
  for (std::uint32_t row = 0; row < 3000; ++row) pairs.push_back({row, row / 600});
  ASSERT_TRUE(c.begin(pairs, 3000));
  const auto sent = c.sent();
  EXPECT_EQ(sent.size(), 5u);
  std::map<std::uint32_t, std::set<std::uint64_t>> requests_of_expert;
  for (const Request& request : sent) {
    EXPECT_LE(request.rows.size(), 1024u);
    for (const wire::Pair& pair : request.wire_pairs) requests_of_expert[pair.expert].insert(request.id);
  }
  for (const auto& [expert, ids] : requests_of_expert) EXPECT_EQ(ids.size(), 1u);
  for (const Request& request : sent) c.answer(request);
  EXPECT_TRUE(c.engine.finished());
}

TEST(RoundEngine, PowerOfTwoChoicesPrefersTheFasterReplica) {
  Cluster c(2);
  c.up(0, holds(0, 64));
  c.up(1, holds(0, 64));
  c.measure(0, 1ms);
  c.measure(1, 40ms);
  int fast = 0;
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(c.begin({{0, 1}}));
    const Request request = c.sent().at(0);
    fast += request.worker == 0;
    c.answer(request);
    ASSERT_TRUE(c.engine.end(c.fleet, c.now));
  }
  EXPECT_EQ(fast, 20);
}

TEST(RoundEngine, AnExpertPickedTwiceForARowIsComputedLocally) {
  Cluster c(1);
  c.up(0, holds(0, 16));
  ASSERT_TRUE(c.begin({{0, 1}, {0, 1}, {0, 2}}));
  EXPECT_EQ(c.sent().at(0).pairs.size(), 1u);
  EXPECT_EQ(c.engine.take_local(false).size(), 2u);
}

}  // namespace
}  // namespace kvasir::dispatch
