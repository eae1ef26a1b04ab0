// Limits that a stranger can make the market reach: each is reached here.
#include <gtest/gtest.h>

#include "hub/core/testing.h"

namespace kvasir::hub {
namespace {

TEST(MarketLimits, NodesAreCounted) {
  Market market(without_proof(), seeded(1));
  ASSERT_TRUE(market.put_model(uniform_model("m", 1, 8)));
  for (std::size_t i = 0; i < kNodesMax; ++i)
    ASSERT_TRUE(market.coverage(beat("w" + std::to_string(i), {}), at(0)));
  const auto refused = market.coverage(beat("one more", {}), at(0));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().action, ErrorAction::kRetryLater);
  EXPECT_TRUE(market.coverage(beat("w0", {}), at(1))) << "those that are in stay in";
  EXPECT_EQ(market.node_count(), kNodesMax);
}

TEST(MarketLimits, ModelsAreCounted) {
  Market market(without_proof(), seeded(1));
  for (std::size_t i = 0; i < kModelsMax; ++i)
    ASSERT_TRUE(market.put_model(uniform_model("m" + std::to_string(i), 1, 8)));
  EXPECT_FALSE(market.put_model(uniform_model("one more", 1, 8)));
  EXPECT_TRUE(market.put_model(uniform_model("m0", 1, 16))) << "a model may be replaced";
}

TEST(MarketLimits, RangesOfANodeAreCounted) {
  Market market(without_proof(), seeded(1));
  ASSERT_TRUE(market.put_model(uniform_model("m", 3, 65'536)));
  std::vector<Segment> held;
  for (std::uint32_t i = 0; i <= kSegmentsMax; ++i) held.push_back({i / 30'000, 2 * (i % 30'000), 2 * (i % 30'000) + 1});
  EXPECT_FALSE(market.coverage(beat("w", held), at(0)));
  held.pop_back();
  EXPECT_TRUE(market.coverage(beat("w", held), at(0)));
}

// One token asks again and again, and never says as whom.
TEST(MarketLimits, ReservationsAreCounted) {
  MarketOptions options = without_proof();
  options.experts_min = 1;
  options.target = 5;
  Market market(options, seeded(1));
  ASSERT_TRUE(market.put_model(uniform_model("m", 1, 65'536)));
  for (std::size_t i = 0; i < kReservationsMax; ++i) {
    const auto got = market.volunteer(offer_experts(1), at(0));
    ASSERT_TRUE(got && *got) << i;
  }
  EXPECT_EQ(market.reservation_count(), kReservationsMax);
  const auto refused = market.volunteer(offer_experts(1), at(0));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().action, ErrorAction::kRetryLater);
  // They end by themselves, and give way to others.
  EXPECT_TRUE(market.volunteer(offer_experts(1), at(3600)));
  EXPECT_EQ(market.reservation_count(), 1u);
}

TEST(MarketLimits, AnAnswerToAVolunteerHasAtMostSoManyRanges) {
  MarketOptions options = without_proof();
  options.experts_min = 1;
  Market market(options, seeded(1));
  // Every other expert is held twice: a thousand holes of one expert each.
  ASSERT_TRUE(market.put_model(uniform_model("m", 8, 256)));
  std::vector<Segment> held;
  for (std::uint32_t layer = 0; layer < 8; ++layer)
    for (std::uint32_t expert = 0; expert < 256; expert += 2) held.push_back({layer, expert, expert + 1});
  for (const char* name : {"a", "b"}) ASSERT_TRUE(market.coverage(beat(name, normalize(held)), at(0)));
  const auto offered = market.volunteer(offer_experts(1'000'000), at(1));
  ASSERT_TRUE(offered && *offered);
  EXPECT_LE((*offered)->runs.size(), kAssignmentsMax);
}

}  // namespace
}  // namespace kvasir::hub
