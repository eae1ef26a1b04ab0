#include "cli/swarm_plan.h"

#include <gtest/gtest.h>

#include <cmath>

namespace kvasir::cli {
namespace {

constexpr std::uint64_t kGiB = 1ull << 30;

// 48 layers of 256 experts of 5.5 MB, 8 used: the shape of a 122B model.
ModelShape big() {
  ModelShape model{.layers = {}, .n_embd = 3072, .n_used = 8, .dense_bytes = 10'000'000'000};
  model.layers.assign(48, {256, 5'500'000});
  return model;
}

TEST(SwarmPlan, ReadsListsOfMachines) {
  EXPECT_EQ(*parse_machines("4x8G,16G"), (std::vector<std::uint64_t>{8 * kGiB, 8 * kGiB, 8 * kGiB, 8 * kGiB, 16 * kGiB}));
  EXPECT_EQ(*parse_machines("512M"), (std::vector<std::uint64_t>{kGiB / 2}));
  EXPECT_EQ(*parse_machines("1.5GiB,2gB"), (std::vector<std::uint64_t>{kGiB * 3 / 2, 2 * kGiB}));
  for (const char* wrong : {"", "8", "x8G", "0x8G", "4x", "4x8Q", "-1G", "4x8G;2G", "5000x1G", "99999999T", "nanG"})
    EXPECT_FALSE(parse_machines(wrong)) << wrong;
}

TEST(SwarmPlan, SharesAreDisjointCompleteAndFit) {
  const ModelShape model = big();
  const std::vector<std::vector<std::uint64_t>> fleets = {
      std::vector<std::uint64_t>(12, 8 * kGiB), {64 * kGiB, 32 * kGiB, 16 * kGiB}, {128 * kGiB}, std::vector<std::uint64_t>(200, kGiB)};
  for (const auto& machines : fleets) {
    const SwarmPlan plan = make_plan(model, machines);
    ASSERT_EQ(plan.shares.size(), machines.size());
    std::uint32_t next = 0;
    std::uint64_t bytes = 0;
    for (const Share& share : plan.shares) {
      EXPECT_EQ(share.experts.begin, next);
      next = share.experts.end;
      bytes += share.bytes;
      EXPECT_LE(static_cast<double>(share.bytes), static_cast<double>(share.memory_bytes) * (1 - kMemoryKept));
    }
    EXPECT_EQ(bytes + plan.missing_bytes, model.expert_bytes());
    if (plan.copies > 0 && machines[0] >= 8 * kGiB) {
      EXPECT_EQ(plan.missing_bytes, 0u);
    }
  }
}

TEST(SwarmPlan, LargerMachinesHoldMore) {
  const SwarmPlan plan = make_plan(big(), {64 * kGiB, 32 * kGiB, 32 * kGiB});
  EXPECT_EQ(plan.copies, 1u);
  EXPECT_EQ(plan.missing_bytes, 0u);
  EXPECT_EQ(plan.shares[0].experts, (Range{0, 128}));
  EXPECT_EQ(plan.shares[1].experts, (Range{128, 192}));
  EXPECT_EQ(plan.shares[2].experts, (Range{192, 256}));
}

TEST(SwarmPlan, WhatFitsNowhereIsMissing) {
  const SwarmPlan plan = make_plan(big(), {16 * kGiB, 16 * kGiB});
  EXPECT_EQ(plan.copies, 0u);
  EXPECT_GT(plan.missing_bytes, 40'000'000'000u);
  EXPECT_GT(plan.shares[1].bytes, 0u);
}

TEST(SwarmPlan, CountsMachines) {
  const ModelShape model = big();
  const std::uint64_t n = machines_needed(model, 8 * kGiB);
  EXPECT_EQ(make_plan(model, std::vector<std::uint64_t>(n, 8 * kGiB)).missing_bytes, 0u);
  EXPECT_GT(make_plan(model, std::vector<std::uint64_t>(n - 1, 8 * kGiB)).missing_bytes, 0u);
}

TEST(SwarmPlan, RoundTripsBoundTheSpeed) {
  const ModelShape model = big();
  const std::vector<double> shares(8, 0.125);
  Speeds speeds;
  double before = 1e9;
  for (const double rtt : {0.0001, 0.001, 0.013, 0.03}) {
    const Cost cost = estimate(model, shares, rtt, speeds);
    EXPECT_LT(cost.tokens_per_s.low, cost.tokens_per_s.high);
    EXPECT_LT(cost.tokens_per_s.high, 1 / (48 * rtt));  // layers x round trip is the floor
    EXPECT_LT(cost.tokens_per_s.high, before);
    before = cost.tokens_per_s.high;
  }
}

TEST(SwarmPlan, BytesAreThoseOfTheWire) {
  ModelShape model = big();
  // One worker with everything: one row there, eight rows back, in each of 48 layers.
  const Cost one = estimate(model, {1.0}, 0.001, {});
  EXPECT_DOUBLE_EQ(one.workers_asked, 1);
  EXPECT_EQ(one.bytes_per_token, 48u * (24 + 24 + 24 + 24 + 4 * 3072 + 8 * (8 + 4 * 3072)));
  // A weighted f16 sum: one row each way; within the goal of 12.6 KB a token and layer.
  EXPECT_LE(one.bytes_per_token_f16 / 48, 12'600u);
  const Cost eight = estimate(model, std::vector<double>(8, 0.125), 0.001, {});
  EXPECT_NEAR(eight.workers_asked, 8 * (1 - std::pow(0.875, 8)), 1e-9);
}

TEST(SwarmPlan, NobodyToAskCostsNoRoundTrip) {
  const Cost cost = estimate(big(), {}, 0.03, {});
  EXPECT_EQ(cost.bytes_per_token, 0u);
  EXPECT_GT(cost.tokens_per_s.high, 1.0);
}

}  // namespace
}  // namespace kvasir::cli
