// Limits that a peer can make the core reach: each is reached here.
#include <gtest/gtest.h>

#include "dispatch/core/test_cluster.h"

namespace kvasir::dispatch::testing {
namespace {

TEST(CoreLimits, AnExpertIsAskedOfAtMostSoManyWorkers) {
  Cluster c(kTriesMax + 4);
  for (WorkerIndex w = 0; w < kTriesMax + 4; ++w) c.up(w, holds(0, 16));
  ASSERT_TRUE(c.begin({{0, 1}}));
  std::uint32_t asked = 0;
  for (std::vector<Request> sent = c.sent(); !sent.empty(); sent = c.sent(), ++asked) {
    ASSERT_EQ(sent.size(), 1u);
    c.engine.on_error(sent[0].worker, sent[0].id, wire::ErrorCode::kBusy, c.now);
    c.step(0ms);
  }
  EXPECT_EQ(asked, kTriesMax);
  EXPECT_TRUE(c.engine.has_local());
}

TEST(CoreLimits, ALinkThatOwesTooManyAnswersIsReplaced) {
  Cluster c(1);
  c.up(0, holds(0, 16));
  // Rounds that are given up one after the other; what was asked stays owed.
  for (std::uint32_t owed = 1; owed <= kUnansweredMax + 1; ++owed) {
    ASSERT_TRUE(c.begin({{0, 1}}));
    ASSERT_EQ(c.sent().size(), 1u);
    EXPECT_TRUE(c.engine.to_drop.empty()) << owed;
    ASSERT_TRUE(c.engine.end(c.fleet, c.now));
  }
  EXPECT_EQ(c.engine.to_drop, std::vector<WorkerIndex>{0});
  c.engine.link_down(0);
  EXPECT_EQ(c.engine.outstanding(), 0u);
}

TEST(CoreLimits, ARoundHasAtMostSoManyPairs) {
  Cluster c(1);
  const Status refused = c.begin(std::vector<wire::Pair>(std::size_t{kRoundPairsMax} + 1));
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("--ubatch-size"), std::string::npos);
}

TEST(CoreLimits, ExpertsNumbersOfHoldingsAreCut) {
  Cluster c(1);
  wire::Holdings far = holds(0, 1);
  far.entries[0].experts.add({wire::kExpertsMax - 1, wire::kExpertsMax + 100});
  c.up(0, far);
  const auto table = c.fleet.routes();
  const LayerRoutes* routes = table->find({layer_id(1)});
  ASSERT_NE(routes, nullptr);
  EXPECT_EQ(routes->n_expert(), wire::kExpertsMax);
}

}  // namespace
}  // namespace kvasir::dispatch::testing
