#include "ffn/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

namespace kvasir::ffn {
namespace {

std::uint32_t below(std::uint32_t n, std::mt19937& rng) { return static_cast<std::uint32_t>(rng() % n); }

std::vector<LocalPair> random_pairs(std::uint32_t n, std::uint32_t n_local, std::mt19937& rng) {
  std::vector<LocalPair> pairs(n);
  // A skewed choice: low experts are hot.
  for (LocalPair& pair : pairs)
    pair = {below(100, rng), below(n_local, rng) * below(2, rng)};
  return pairs;
}

// Rows per expert of each call; also checks that every pair is in exactly one call.
std::vector<std::map<std::uint32_t, std::uint32_t>> calls_of(const CallPlan& plan, std::span<const LocalPair> pairs) {
  std::vector<std::map<std::uint32_t, std::uint32_t>> calls;
  std::set<std::uint32_t> seen;
  std::uint32_t begin = 0;
  for (std::uint32_t end : plan.ends) {
    EXPECT_LT(begin, end);
    auto& call = calls.emplace_back();
    for (std::uint32_t i = begin; i < end; ++i) {
      const std::uint32_t at = plan.order.empty() ? i : plan.order[i];
      EXPECT_TRUE(seen.insert(at).second);
      ++call[pairs[at].expert];
    }
    begin = end;
  }
  EXPECT_EQ(seen.size(), pairs.size());
  return calls;
}

CallPlan whole_experts(std::span<const LocalPair> pairs, std::uint32_t n_local, std::uint32_t pairs_max) {
  CallPlan plan;
  plan.whole_experts(pairs, n_local, pairs_max);
  return plan;
}
CallPlan invariant(std::span<const LocalPair> pairs, std::uint32_t n_local, std::uint32_t rows_max,
                   std::uint32_t pairs_max) {
  CallPlan plan;
  plan.invariant(pairs, n_local, rows_max, pairs_max);
  return plan;
}

TEST(Plan, ASmallRequestIsOneCallInItsOwnOrder) {
  const std::vector<LocalPair> pairs{{0, 1}, {1, 0}, {2, 1}};
  EXPECT_TRUE(whole_experts(pairs, 2, 3).order.empty());
  EXPECT_EQ(whole_experts(pairs, 2, 3).ends, std::vector<std::uint32_t>{3});
  EXPECT_TRUE(invariant(pairs, 2, 2, 3).order.empty());
}

TEST(Plan, WholeExpertsAreNeverCutAndCallsStayBelowTheLimit) {
  std::mt19937 rng(1);
  for (int round = 0; round < 200; ++round) {
    const std::uint32_t n_local = 1 + below(20, rng), n = 1 + below(300, rng), pairs_max = 1 + below(60, rng);
    const std::vector<LocalPair> pairs = random_pairs(n, n_local, rng);
    std::set<std::uint32_t> done;
    for (const auto& call : calls_of(whole_experts(pairs, n_local, pairs_max), pairs)) {
      std::uint32_t total = 0;
      for (const auto& [expert, rows] : call) {
        EXPECT_TRUE(done.insert(expert).second) << "expert " << expert << " is in two calls";
        total += rows;
      }
      EXPECT_TRUE(total <= pairs_max || call.size() == 1);
    }
  }
}

TEST(Plan, InvariantCallsBoundRowsPerExpertAndInTotal) {
  std::mt19937 rng(2);
  for (int round = 0; round < 200; ++round) {
    const std::uint32_t n_local = 1 + below(20, rng), n = 1 + below(300, rng), rows_max = 1 + below(16, rng);
    const std::uint32_t pairs_max = 1 + below(60, rng);
    const std::vector<LocalPair> pairs = random_pairs(n, n_local, rng);
    for (const auto& call : calls_of(invariant(pairs, n_local, rows_max, pairs_max), pairs)) {
      std::uint32_t total = 0;
      for (const auto& [expert, rows] : call) {
        EXPECT_LE(rows, rows_max);
        total += rows;
      }
      EXPECT_LE(total, pairs_max);
    }
  }
}

}  // namespace
}  // namespace kvasir::ffn
