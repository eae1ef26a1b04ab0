// A replica that was slow once gets its share back, and no round pays for finding out.
#include <gtest/gtest.h>

#include <cmath>

#include "dispatch/core/test_cluster.h"

namespace kvasir::dispatch {
namespace {

using namespace testing;

TEST(LatencyModel, AnOldEstimateGivesWayToAQuickerAnswer) {
  LatencyModel model;
  EXPECT_FALSE(model.improve(8, 1ms)) << "nothing is known";
  for (int i = 0; i < 20; ++i) {
    model.observe(1, 40ms);
    model.observe(8, 40ms);
    model.observe(4096, 4s);
  }
  EXPECT_FALSE(model.improve(8, 50ms));
  EXPECT_FALSE(model.improve(8, 39ms));
  EXPECT_TRUE(model.improve(8, 400us));
  EXPECT_NEAR(static_cast<double>(model.predict(8).expected.count()), 4e6, 4e5);
  EXPECT_LT(model.predict(1).expected, 5ms);
  EXPECT_NEAR(static_cast<double>(model.predict(4096).expected.count()), std::sqrt(4e9 * 512 * 4e5), 1e6) << "in proportion at most";
  // Small requests may have been quick all the time: what was slow with larger ones is believed no more.
  LatencyModel mixed;
  for (int i = 0; i < 20; ++i) {
    mixed.observe(1, 1ms);
    mixed.observe(8, 40ms);
  }
  EXPECT_TRUE(mixed.improve(1, 1ms));
  EXPECT_LT(mixed.predict(8).expected, 20ms);
}

// A worker that was slow with large requests, and is asked for small ones since, is not slow for ever.
TEST(LatencyModel, QuickSmallAnswersAgeWhatIsKnownOfLargerOnes) {
  LatencyModel model;
  for (int i = 0; i < 20; ++i) model.observe(16, 160ms);
  for (int i = 0; i < 40; ++i) model.observe(1, 1ms);
  EXPECT_LT(model.predict(16).expected, 18ms) << "in proportion";
  EXPECT_GT(model.predict(16).expected, 15ms) << "and no less";
  for (int i = 0; i < 40; ++i) model.observe(16, 2ms);
  EXPECT_LT(model.predict(16).expected, 3ms);
  EXPECT_LE(model.predict(1).expected, model.predict(16).expected);
}

// Two workers that hold everything; the first was measured at 40 ms, the second at 1 ms.
struct Trial : ::testing::Test {
  Cluster c{2};
  Trial() {
    for (const WorkerIndex w : {0u, 1u}) c.up(w, holds(0, 64));
    c.measure(0, 40ms);
    c.measure(1, 1ms);
  }
  // One round, in which each worker answers after its own time; those asked.
  struct Asked {
    int requests = 0, trials = 0;
  };
  Asked round(Nanos first_takes) {
    Asked first;
    EXPECT_TRUE(c.begin({{0, 1}}));
    const std::vector<Request> sent = c.sent();
    const TimePoint start = c.now;
    for (const Request& request : sent) {
      if (request.worker != 0) continue;
      ++(request.is_trial ? first.trials : first.requests);
    }
    const auto answer_of = [&](WorkerIndex w) {
      for (const Request& request : sent)
        if (request.worker == w) c.answer(request);
    };
    if (first_takes < 1ms) {
      c.now = start + first_takes;
      answer_of(0);
    }
    c.now = start + 1ms;
    answer_of(1);
    EXPECT_TRUE(c.engine.finished());
    EXPECT_TRUE(c.engine.end(c.fleet, c.now));
    EXPECT_TRUE(c.engine.to_cancel.empty()) << "a copy is let run to its end";
    if (first_takes >= 1ms) {
      c.now = start + first_takes;
      answer_of(0);  // nobody waits for it
    }
    c.now += 5ms;
    return first;
  }
};

TEST_F(Trial, AWorkerThatIsStillSlowIsTriedSeldomAndNeverWaitedFor) {
  c.now += 3s;
  int trials = 0, requests = 0;
  const TimePoint end = c.now + 120s;
  while (c.now < end) {
    const Asked asked = round(40ms);
    trials += asked.trials;
    requests += asked.requests;
  }
  EXPECT_EQ(requests, 0);
  EXPECT_GE(trials, 4);
  EXPECT_LE(trials, 8) << "at 0, 4, 12, 28, 58, … seconds";
  EXPECT_EQ(c.engine.counters().trials, static_cast<std::uint64_t>(trials));
  EXPECT_EQ(c.engine.counters().hedges, 0u);
  EXPECT_EQ(c.fleet.outstanding_pairs(0), 0u);
}

TEST_F(Trial, AWorkerThatIsQuickAgainGetsItsShareBack) {
  c.now += 3s;
  const TimePoint end = c.now + 10s;
  int requests = 0;
  while (c.now < end) requests += round(900us).requests;
  EXPECT_GT(requests, 100);
}

// Between rounds nobody reads: an answer that is found late was given within that time at most.
TEST_F(Trial, AnAnswerFoundBetweenRoundsSaysAtMost) {
  c.now += 3s;
  const Nanos before = c.fleet.predicted_finish(0, 1, c.now);
  for (int i = 0; i < 400; ++i) round(8ms);
  EXPECT_LT(c.fleet.predicted_finish(0, 1, c.now), before / 2);
}

TEST_F(Trial, AFreshEstimateIsBelieved) {
  for (int i = 0; i < 20; ++i) EXPECT_EQ(round(40ms).trials, 0);
}

TEST_F(Trial, SumsAreNotTouchedByACopysAnswer) {
  c.now += 3s;
  ASSERT_TRUE(c.begin_sums({{0, 1}, {0, 2}, {1, 2}}));
  bool tried = false;
  for (const Request& request : c.sent()) {
    if (!request.is_trial) continue;
    tried = true;
    EXPECT_EQ(request.worker, 0u);
    EXPECT_EQ(c.answer_sums(request), Verdict::kTaken);
  }
  EXPECT_TRUE(tried);
  EXPECT_EQ(c.written, std::vector<int>(3, 0));
  EXPECT_FALSE(c.engine.finished());
  c.engine.link_down(0);
  c.engine.link_down(1);
  c.step(0ms);
  c.run_local();
  EXPECT_TRUE(c.engine.end(c.fleet, c.now));
}

}  // namespace
}  // namespace kvasir::dispatch
