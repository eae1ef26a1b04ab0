#include <gtest/gtest.h>

#include "base/bytes.h"
#include "base/check.h"
#include "base/expert_set.h"
#include "base/hex.h"
#include "base/math.h"

namespace kvasir {
namespace {

// An assert would be gone from the builds that people run.
TEST(Check, HoldsInEveryBuild) { EXPECT_DEATH(KVASIR_CHECK(1 + 1 == 3), "1 \\+ 1 == 3"); }

TEST(ByteCursor, ShortReadIsSticky) {
  Bytes bytes;
  ByteWriter(bytes).put<std::uint16_t>(0x0201);
  ByteCursor in(bytes);
  EXPECT_EQ(in.get<std::uint8_t>(), 1);
  EXPECT_EQ(in.get<std::uint32_t>(), 0u);
  EXPECT_FALSE(in.ok());
  EXPECT_EQ(in.get<std::uint8_t>(), 0);
  EXPECT_FALSE(in.at_end());
}

TEST(Hex, RoundTripAndRefusals) {
  const Bytes bytes = *from_hex("00ff7A");
  EXPECT_EQ(to_hex(bytes), "00ff7a");
  EXPECT_FALSE(from_hex("0"));
  EXPECT_FALSE(from_hex("0g"));
}

TEST(Math, Overflow) {
  EXPECT_FALSE(checked_mul<std::uint64_t>(1ull << 63, 2));
  EXPECT_FALSE(checked_align_up<std::uint64_t>(~0ull, 32));
  EXPECT_EQ(checked_align_up<std::uint64_t>(33, 32), 64u);
}

TEST(ExpertSet, ParseAndFormat) {
  const ExpertSet set = *parse_ranges("9:12,3,7,10:13", 16, "expert");
  EXPECT_EQ(format_ranges(set), "3,7,9:13");
  EXPECT_EQ(set.size(), 6u);
  EXPECT_EQ(set.rank(9), 2u);
  EXPECT_FALSE(set.rank(8));
  EXPECT_EQ(set, ExpertSet::from_ids({12, 11, 10, 9, 9, 7, 3}));
  EXPECT_EQ(*parse_ranges("all", 4, "expert"), ExpertSet::all(4));
}

TEST(ExpertSet, RefusesInWords) {
  for (const char* text : {"", "a", "1,", "1:", ":3,", "-1", "4294967295", "1 ,2"})
    EXPECT_FALSE(parse_ranges(text, 16, "expert")) << text;
  EXPECT_NE(parse_ranges("5:5", 16, "expert").error().message.find("empty"), std::string::npos);
  EXPECT_NE(parse_ranges("7:5", 16, "layer").error().message.find("layer"), std::string::npos);
  EXPECT_NE(parse_ranges("0:17", 16, "expert").error().message.find("0:16"), std::string::npos);
}

TEST(ExpertSet, AddMergesTouchingRanges) {
  ExpertSet set;
  set.add({4, 6});
  set.add({0, 2});
  set.add({8, 9});
  set.add({2, 4});
  EXPECT_EQ(set.ranges(), (std::vector<Range>{{0, 6}, {8, 9}}));
}

}  // namespace
}  // namespace kvasir
