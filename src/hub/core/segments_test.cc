#include "hub/core/segments.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace kvasir::hub {
namespace {

using CellSet = std::set<std::pair<std::uint32_t, std::uint32_t>>;

CellSet cells(const std::vector<Segment>& segments) {
  CellSet out;
  for (const Segment& s : segments)
    for (std::uint32_t e = s.begin; e < s.end; ++e) out.emplace(s.layer, e);
  return out;
}

void expect_normal(const Segments& segments) {
  for (std::size_t i = 0; i < segments.size(); ++i) {
    EXPECT_LT(segments[i].begin, segments[i].end);
    if (i == 0) continue;
    const Segment &a = segments[i - 1], &b = segments[i];
    EXPECT_TRUE(a.layer < b.layer || (a.layer == b.layer && a.end < b.begin));
  }
}

TEST(Segments, OperationsAgreeWithSetsOfCells) {
  std::mt19937 random(7);
  const auto below = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
  const auto some = [&] {
    std::vector<Segment> out(below(8));
    for (Segment& s : out) {
      s = {below(3), below(20), 0};
      s.end = s.begin + below(7);
    }
    return out;
  };
  for (int round = 0; round < 3000; ++round) {
    const auto raw_a = some(), raw_b = some();
    const Segments a = normalize(raw_a), b = normalize(raw_b);
    expect_normal(a);
    const CellSet in_a = cells(raw_a), in_b = cells(raw_b);
    ASSERT_EQ(cells(a), in_a);
    CellSet both, only_a;
    for (const auto& cell : in_a) (in_b.contains(cell) ? both : only_a).insert(cell);
    const Segments common = intersect(a, b), rest = subtract(a, b);
    expect_normal(common);
    expect_normal(rest);
    ASSERT_EQ(cells(common), both);
    ASSERT_EQ(cells(rest), only_a);
    ASSERT_EQ(count_experts(a), in_a.size());
    ASSERT_EQ(is_subset(a, b), only_a.empty());
    std::uint64_t index = 0;
    for (const auto& [layer, expert] : in_a) {
      const Cell cell = nth_expert(a, index++);
      ASSERT_EQ(std::pair(cell.layer, cell.expert), std::pair(layer, expert));
    }
    for (std::uint32_t layer = 0; layer < 3; ++layer)
      for (std::uint32_t e = 0; e < 30; ++e) ASSERT_EQ(contains(a, layer, e), in_a.contains({layer, e}));
  }
}

}  // namespace
}  // namespace kvasir::hub
