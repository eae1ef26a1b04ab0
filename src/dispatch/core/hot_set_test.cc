#include "dispatch/core/hot_set.h"

#include <gtest/gtest.h>

namespace kvasir::dispatch {
namespace {

// As many uses as one pick needs: `share` of them of expert `hot`, the others spread evenly.
void use(HotSet& set, std::uint32_t layer, std::uint32_t hot, double share, std::uint32_t n_expert = 16) {
  for (std::uint32_t i = 0; i < HotSet::kPickEveryUses; ++i) {
    const bool is_hot = (i * 101) % 1000 < static_cast<std::uint32_t>(share * 1000);
    const wire::Pair pair{0, is_hot ? hot : i % n_expert};
    set.note_uses(layer, {&pair, 1});
  }
}

std::vector<std::uint32_t> members(const HotSet& set, std::uint32_t layer) {
  std::vector<std::uint32_t> out;
  if (const HotSet::Members members = set.members(layer))
    for (std::uint32_t e = 0; e < members->size(); ++e)
      if ((*members)[e] != 0) out.push_back(e);
  return out;
}

TEST(HotSet, PicksTheMostUsedWithinTheBudget) {
  HotSet set(250);
  set.add_layer(0, 16, 100);
  EXPECT_TRUE(members(set, 0).empty());
  use(set, 0, 5, 0.5);
  EXPECT_EQ(members(set, 0).size(), 2u);  // 5 and one more; a third would pass 250 bytes
  EXPECT_EQ((*set.members(0))[5], 1);
  EXPECT_EQ(set.bytes(), 200u);
}

TEST(HotSet, CountsUsesForEachByteAcrossLayers) {
  HotSet set(100);
  set.add_layer(0, 16, 100);
  set.add_layer(1, 16, 10);
  set.add_layer(2, 16, 0);  // not to be computed here
  for (std::uint32_t i = 0; i < HotSet::kPickEveryUses / 3 + 1; ++i)
    for (std::uint32_t layer : {0u, 1u, 2u}) {
      const wire::Pair pair{0, 7};
      set.note_uses(layer, {&pair, 1});
    }
  EXPECT_TRUE(members(set, 0).empty());
  EXPECT_EQ(members(set, 1), std::vector<std::uint32_t>{7});
  EXPECT_TRUE(members(set, 2).empty());
}

TEST(HotSet, FollowsUseAndDoesNotThrash) {
  HotSet set(100);
  set.add_layer(0, 16, 100);
  use(set, 0, 3, 0.5);
  EXPECT_EQ(members(set, 0), std::vector<std::uint32_t>{3});
  use(set, 0, 9, 0.5);  // 9 now, 3 before: the earlier uses count half and 3 stays unless it is clearly beaten
  use(set, 0, 9, 0.5);
  use(set, 0, 9, 0.5);
  EXPECT_EQ(members(set, 0), std::vector<std::uint32_t>{9});
  // Almost equal use of two: whoever is in stays in.
  for (int i = 0; i < 6; ++i) {
    use(set, 0, i % 2 == 0 ? 3 : 9, 0.05);
    EXPECT_EQ(members(set, 0).size(), 1u);
  }
  const auto settled = members(set, 0);
  use(set, 0, settled[0] == 9 ? 3 : 9, 0.02);
  EXPECT_EQ(members(set, 0), settled);
}

TEST(HotSet, WithoutABudgetNothingIsCounted) {
  HotSet set(0);
  set.add_layer(0, 16, 1);
  use(set, 0, 1, 1.0);
  EXPECT_TRUE(members(set, 0).empty());
}

}  // namespace
}  // namespace kvasir::dispatch
