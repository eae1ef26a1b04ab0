#include "hub/core/targets.h"

#include <gtest/gtest.h>

#include "hub/core/nonces.h"
#include "hub/core/rate_limiter.h"
#include "hub/core/testing.h"

namespace kvasir::hub {
namespace {

constexpr std::uint32_t kExperts[] = {8};

std::uint32_t target_of(const CoverageGrid& grid, std::uint32_t expert) {
  for (const Run& run : grid.runs(0))
    if (run.begin <= expert && expert < run.end) return run.target;
  return 0;
}

TEST(Targets, AHotExpertGetsMoreAndKeepsThemThroughNoise) {
  CoverageGrid grid(kExperts, 2);
  Targets targets(kExperts, 2);
  double now_s = 0;
  targets.update(at(now_s), grid);
  const auto run = [&](std::uint64_t hot_uses, int intervals) {
    for (int i = 0; i < intervals; ++i) {
      std::vector<std::uint64_t> uses(8, 1000);
      uses[3] = hot_uses;
      targets.report_heat(0, uses);
      targets.update(at(now_s += 31), grid);
    }
  };
  run(1000, 3);
  for (std::uint32_t e = 0; e < 8; ++e) EXPECT_EQ(target_of(grid, e), 2u);
  run(10'000, 40);  // 10000 / (17000/8) = 4.7 times the mean
  EXPECT_EQ(target_of(grid, 3), 4u);
  EXPECT_EQ(target_of(grid, 2), 2u);
  run(8000, 40);  // 4.3: below the second step's raise, above its lower threshold
  EXPECT_EQ(target_of(grid, 3), 4u);
  run(1000, 200);  // one step at a time, ten minutes apart, back to the base
  EXPECT_EQ(target_of(grid, 3), 2u);
}

TEST(Targets, FewUsesSayNothing) {
  CoverageGrid grid(kExperts, 2);
  Targets targets(kExperts, 2);
  targets.update(at(0), grid);
  targets.report_heat(0, std::vector<std::uint64_t>{0, 0, 0, 500});
  targets.update(at(31), grid);
  EXPECT_EQ(target_of(grid, 3), 2u);
}

TEST(Targets, SaturationRaisesAllAndIdlenessLowersThemLater) {
  CoverageGrid grid(kExperts, 2);
  Targets targets(kExperts, 2);
  double now_s = 0;
  const auto run = [&](double share, double for_s) {
    for (const double end = now_s + for_s; now_s < end;) {
      targets.report_saturation(share);
      targets.update(at(now_s += 10), grid);
    }
  };
  run(0.9, 45);
  EXPECT_EQ(target_of(grid, 0), 2u);
  run(0.9, 90);
  EXPECT_GE(target_of(grid, 0), 3u);
  run(1.0, 3600);
  EXPECT_EQ(target_of(grid, 0), 2 + kSaturationExtraMax);
  run(0.6, 3600);  // neither busy nor idle
  EXPECT_EQ(target_of(grid, 0), 2 + kSaturationExtraMax);
  run(0.1, 600);
  EXPECT_EQ(target_of(grid, 0), 2 + kSaturationExtraMax);
  run(0.1, 3 * 3600);
  EXPECT_EQ(target_of(grid, 0), 2u);
}

TEST(RateLimiter, BurstThenSteadyAndBounded) {
  RateLimiter limiter({.per_s = 2, .burst = 5}, 3);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(limiter.take("a", at(0)), Nanos::zero());
  EXPECT_NEAR(std::chrono::duration<double>(limiter.take("a", at(0))).count(), 0.5, 1e-6);
  EXPECT_EQ(limiter.take("a", at(0.5)), Nanos::zero());
  EXPECT_GT(limiter.take("a", at(0.5)), Nanos::zero());
  for (const char* key : {"b", "c", "d", "e"}) EXPECT_EQ(limiter.take(key, at(0.5)), Nanos::zero());
  EXPECT_EQ(limiter.size(), 3u);
}

TEST(Nonces, OnceAndForOneSubjectAndNotForLong) {
  Nonces nonces(std::chrono::seconds(60), 3);
  nonces.issue("n1", "alice", at(0));
  EXPECT_FALSE(nonces.redeem("n1", "bob", at(1)));
  EXPECT_FALSE(nonces.redeem("n1", "alice", at(1)));  // spoiled by the wrong try
  nonces.issue("n2", "alice", at(1));
  EXPECT_TRUE(nonces.redeem("n2", "alice", at(2)));
  EXPECT_FALSE(nonces.redeem("n2", "alice", at(2)));
  nonces.issue("n3", "alice", at(2));
  EXPECT_FALSE(nonces.redeem("n3", "alice", at(62)));
  for (const char* name : {"a", "b", "c", "d"}) nonces.issue(name, "x", at(70));
  EXPECT_FALSE(nonces.redeem("a", "x", at(71)));
  EXPECT_TRUE(nonces.redeem("d", "x", at(71)));
}

}  // namespace
}  // namespace kvasir::hub
