#include "hub/core/traffic.h"

#include <gtest/gtest.h>

namespace kvasir::hub {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;

BackboneReport report(const char* who, std::uint64_t rounds, std::uint64_t remote = 0, std::uint64_t local = 0) {
  BackboneReport out;
  out.reporter = who;
  out.counters[static_cast<std::size_t>(Counter::kRounds)] = rounds;
  out.counters[static_cast<std::size_t>(Counter::kPairsRemote)] = remote;
  out.counters[static_cast<std::size_t>(Counter::kPairsLocal)] = local;
  return out;
}

std::uint64_t total(const Traffic& traffic, Counter counter) {
  return traffic.totals()[static_cast<std::size_t>(counter)];
}

TEST(Traffic, RatesAreDifferencesAndAddUp) {
  Traffic traffic;
  TimePoint now{seconds(1000)};
  traffic.report(report("a", 500, 4000), now);
  EXPECT_EQ(traffic.rates(now).rounds, 0);  // one report is no rate
  now += seconds(4);
  traffic.report(report("a", 540, 4240, 80), now);
  traffic.report(report("b", 0), now - seconds(1));
  traffic.report(report("b", 5), now);
  EXPECT_DOUBLE_EQ(traffic.rates(now).rounds, 10 + 5);
  EXPECT_DOUBLE_EQ(traffic.rates(now).local_share(), 0.25);
  EXPECT_EQ(traffic.backbones(now), 2u);
  EXPECT_EQ(total(traffic, Counter::kRounds), 545u);
  // The one that reported each second is gone first, within the floor both stay.
  EXPECT_EQ(traffic.backbones(now + seconds(9)), 2u);
  EXPECT_EQ(traffic.backbones(now + seconds(11)), 1u);
  EXPECT_EQ(traffic.rates(now + seconds(13)).rounds, 0);
}

TEST(Traffic, ARestartedBackboneCountsOn) {
  Traffic traffic;
  TimePoint now{seconds(1000)};
  traffic.report(report("a", 100), now);
  traffic.report(report("a", 30), now + seconds(1));
  EXPECT_DOUBLE_EQ(traffic.rates(now + seconds(1)).rounds, 30);
  EXPECT_EQ(total(traffic, Counter::kRounds), 130u);
  // Too close for a rate; counted with the next.
  traffic.report(report("a", 31), now + seconds(1) + milliseconds(1));
  traffic.report(report("a", 40), now + seconds(2));
  EXPECT_EQ(total(traffic, Counter::kRounds), 140u);
}

TEST(Traffic, SamplesAreEvenAndBounded) {
  Traffic traffic;
  TimePoint now{seconds(1000)};
  EXPECT_TRUE(traffic.advance(now));
  EXPECT_FALSE(traffic.advance(now + seconds(1)));
  EXPECT_TRUE(traffic.advance(now + seconds(7)));
  ASSERT_EQ(traffic.samples().size(), 4u);
  EXPECT_EQ(traffic.samples().back().number, 3u);
  EXPECT_TRUE(traffic.advance(now + minutes(60)));
  EXPECT_EQ(traffic.samples().size(), Traffic::kSamplesMax);
  EXPECT_EQ(traffic.samples().back().number, 1800u);
  EXPECT_EQ(traffic.samples().front().number, 1800u - Traffic::kSamplesMax + 1);
}

TEST(Traffic, ReportersAndWorkersAreBounded) {
  Traffic traffic;
  TimePoint now{seconds(1000)};
  for (std::size_t i = 0; i < 2 * Traffic::kReportersMax; ++i)
    traffic.report(report(std::to_string(i).c_str(), 1), now + milliseconds(i));
  EXPECT_EQ(traffic.backbones(now + seconds(1)), Traffic::kReportersMax);
  BackboneReport told = report("x", 1);
  told.workers["w"] = {250, std::nullopt};
  told.layers = {{0, 10, 100, 200}};
  traffic.report(told, now);
  EXPECT_EQ(traffic.latency_us("w"), 250);
  EXPECT_EQ(traffic.latency_us("v"), std::nullopt);
  EXPECT_EQ(traffic.layers().size(), 1u);
  traffic.report(report("x", 2), now + seconds(1));
  EXPECT_EQ(traffic.layers().size(), 1u);  // not told: as before
}

TEST(Traffic, AWorkerIsSilentWhenNobodyHearsIt) {
  Traffic traffic;
  const TimePoint now{seconds(1000)};
  const auto tell = [&](const char* who, bool reached, Nanos after) {
    BackboneReport told = report(who, 1);
    told.workers["w"].reached = reached;
    traffic.report(told, now + after);
  };
  EXPECT_FALSE(traffic.is_silent("w", now));
  tell("a", true, seconds(0));
  EXPECT_FALSE(traffic.is_silent("w", now));
  tell("a", false, seconds(1));
  EXPECT_TRUE(traffic.is_silent("w", now + seconds(1)));
  tell("b", true, seconds(2));  // one that is cut off itself says nothing of the worker
  EXPECT_FALSE(traffic.is_silent("w", now + seconds(2)));
  tell("b", false, seconds(3));
  EXPECT_TRUE(traffic.is_silent("w", now + seconds(3)));
  EXPECT_FALSE(traffic.is_silent("w", now + seconds(4) + Traffic::kWordTtl));
  // Only the last words are kept.
  for (std::size_t i = 0; i < Traffic::kWordsMax; ++i)
    tell(std::to_string(i).c_str(), false, seconds(10) + milliseconds(i));
  EXPECT_TRUE(traffic.is_silent("w", now + seconds(11)));
  tell("a", true, seconds(11));
  EXPECT_FALSE(traffic.is_silent("w", now + seconds(11)));
}

}  // namespace
}  // namespace kvasir::hub
