// Small rounds go to one worker as a whole where that is quicker, and to several where that is.
#include <gtest/gtest.h>

#include <set>

#include "dispatch/core/test_cluster.h"

namespace kvasir::dispatch {
namespace {

using namespace testing;

TEST(FanOut, BothWaysAreTriedThenTheQuickerIsTaken) {
  for (const FanOutWay quicker : {FanOutWay::kSpread, FanOutWay::kGather}) {
    FanOut fan_out;
    int taken[2] = {};
    for (int i = 0; i < 1000; ++i) {
      const FanOutWay way = fan_out.choose(8);
      ++taken[static_cast<int>(way)];
      fan_out.observe(way, 8, way == quicker ? 900us : 1000us);
    }
    const int other = taken[1 - static_cast<int>(quicker)];
    EXPECT_GE(other, 16 + 1000 / 64 - 1) << "or a verdict could not change";
    EXPECT_LE(other, 40);
  }
}

TEST(FanOut, AVerdictChangesAndOneStallChangesNone) {
  FanOut fan_out;
  const auto rounds = [&](int n, Nanos spread, Nanos gather) {
    int gathered = 0;
    for (int i = 0; i < n; ++i) {
      const FanOutWay way = fan_out.choose(8);
      gathered += way == FanOutWay::kGather;
      fan_out.observe(way, 8, way == FanOutWay::kGather ? gather : spread);
    }
    return gathered;
  };
  rounds(200, 1000us, 500us);
  fan_out.observe(FanOutWay::kGather, 8, 10s);
  EXPECT_GE(rounds(100, 1000us, 500us), 90);
  rounds(3000, 500us, 1000us);
  EXPECT_LE(rounds(100, 500us, 1000us), 4);
}

TEST(FanOut, SizesAreApart) {
  FanOut fan_out;
  for (int i = 0; i < 200; ++i) {
    const FanOutWay way = fan_out.choose(8);
    fan_out.observe(way, 8, way == FanOutWay::kGather ? 1us : 2us);
    const FanOutWay large = fan_out.choose(64);
    fan_out.observe(large, 64, large == FanOutWay::kGather ? 2us : 1us);
  }
  const auto gathered = [&](std::uint32_t pairs) {
    int n = 0;
    for (int i = 0; i < 10; ++i) n += fan_out.choose(pairs) == FanOutWay::kGather;
    return n;
  };
  EXPECT_GE(gathered(15), 9);
  EXPECT_LE(gathered(64), 1);
  EXPECT_EQ(gathered(63), 5) << "is of 32's size, of which nothing is known";
}

const std::vector<wire::Pair> kToken = {{0, 1}, {0, 2}, {0, 3}, {0, 4}, {0, 5}, {0, 6}, {0, 7}, {0, 8}};

struct Gathering : ::testing::Test {
  Cluster c{3};
  // Two hold everything, the third half of it.
  Gathering() {
    c.up(0, holds(0, 64));
    c.up(1, holds(0, 64));
    c.up(2, holds(0, 4));
    for (const WorkerIndex w : {0u, 1u, 2u}) c.measure(w, 1ms);
  }
  // The workers that a round went to, whose answers came after `whole` or, of several, after `part`.
  std::set<WorkerIndex> round(Nanos whole, Nanos part, const std::vector<wire::Pair>& pairs = kToken) {
    EXPECT_TRUE(c.begin(pairs, 64));
    std::vector<Request> sent = c.sent();
    std::set<WorkerIndex> workers;
    for (const Request& request : sent)
      if (!request.is_trial) workers.insert(request.worker);
    c.now += workers.size() == 1 ? whole : part;
    for (const Request& request : sent) EXPECT_EQ(c.answer(request), Verdict::kTaken);
    EXPECT_TRUE(c.engine.finished());
    EXPECT_TRUE(c.engine.end(c.fleet, c.now));
    for (int n : c.written) EXPECT_EQ(n, 1);
    return workers;
  }
  int gathered(int rounds, Nanos whole, Nanos part) {
    int n = 0;
    for (int i = 0; i < rounds; ++i) n += round(whole, part).size() == 1;
    return n;
  }
};

TEST_F(Gathering, WorkersThatShareAMachineGetWholeRounds) {
  gathered(100, 1000us, 1100us);
  EXPECT_GE(gathered(100, 1000us, 1100us), 95);
}

TEST_F(Gathering, WorkersOnMachinesOfTheirOwnGetParts) {
  gathered(100, 1000us, 600us);
  EXPECT_LE(gathered(100, 1000us, 600us), 5);
}

TEST_F(Gathering, OnlyAWorkerThatHoldsAllIsGivenAll) {
  for (int i = 0; i < 200; ++i) {
    const std::set<WorkerIndex> workers = round(1000us, 1100us);
    EXPECT_FALSE(workers.size() == 1 && *workers.begin() == 2);
  }
  c.engine.link_down(0);
  c.engine.link_down(1);
  ASSERT_TRUE(c.begin(kToken));
  for (const Request& request : c.sent()) EXPECT_EQ(request.worker, 2u);
  c.run_local();
  EXPECT_FALSE(c.engine.finished());
}

TEST_F(Gathering, AWorkerThatGrowsSlowLosesItsRounds) {
  gathered(100, 1000us, 1100us);
  const WorkerIndex first = *round(1000us, 1100us).begin();
  c.measure(first, 30ms);
  int others = 0;
  for (int i = 0; i < 100; ++i) others += !round(1000us, 1100us).contains(first);
  EXPECT_GE(others, 90);
}

TEST_F(Gathering, LargeRoundsAreSpread) {
  std::vector<wire::Pair> prompt;
  for (std::uint32_t row = 0; row < 64; ++row)
    for (std::uint32_t e = 1; e <= 8; ++e) prompt.push_back({row, e});
  for (int i = 0; i < 100; ++i) EXPECT_GT(round(1ms, 10ms, prompt).size(), 1u);
}

TEST_F(Gathering, ALostWorkersWholeRoundIsPlacedAnew) {
  gathered(100, 1000us, 1100us);
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(c.begin(kToken));
    const std::vector<Request> sent = c.sent();
    if (sent.size() > 1) {  // this one was spread, to see
      for (const Request& request : sent) c.answer(request);
      ASSERT_TRUE(c.engine.end(c.fleet, c.now));
      continue;
    }
    c.engine.link_down(sent[0].worker);
    c.step(1ms);
    for (const Request& request : c.sent()) {
      EXPECT_NE(request.worker, sent[0].worker);
      c.answer(request);
    }
    EXPECT_TRUE(c.engine.finished());
    EXPECT_TRUE(c.engine.end(c.fleet, c.now));
    EXPECT_EQ(c.written, std::vector<int>(8, 1));
    return;
  }
  FAIL() << "no round was gathered";
}

}  // namespace
}  // namespace kvasir::dispatch
