#include "plugin/coverage_notice.h"

#include <gtest/gtest.h>

namespace kvasir::plugin {
namespace {

constexpr std::uint64_t kMany = CoverageNotice::kPairsMin;

TEST(CoverageNotice, IsSilentWhileWorkersDoTheWork) {
  CoverageNotice notice;
  EXPECT_FALSE(notice.look(0, 0));
  EXPECT_FALSE(notice.look(kMany, 0));
  EXPECT_FALSE(notice.look(2 * kMany, 1));
}

TEST(CoverageNotice, SpeaksOnceEachWay) {
  CoverageNotice notice;
  std::uint64_t remote = kMany, local = 0;
  EXPECT_FALSE(notice.look(remote, local));
  const auto partial = notice.look(remote += kMany / 2, local += kMany / 2);
  ASSERT_TRUE(partial);
  EXPECT_NE(partial->find("50 %"), std::string::npos) << *partial;
  EXPECT_FALSE(notice.look(remote += kMany / 2, local += kMany / 2));
  const auto whole = notice.look(remote += kMany, local);
  ASSERT_TRUE(whole);
  EXPECT_NE(whole->find("again"), std::string::npos);
  EXPECT_FALSE(notice.look(remote += kMany, local));
  EXPECT_TRUE(notice.look(remote, local + kMany));
}

TEST(CoverageNotice, WaitsForEnoughToJudge) {
  CoverageNotice notice;
  EXPECT_FALSE(notice.look(0, kMany - 1));
  EXPECT_TRUE(notice.look(0, kMany));
}

TEST(CoverageNotice, DoesNotFlutter) {
  CoverageNotice notice;
  std::uint64_t remote = 0, local = 0;
  int spoken = 0;
  for (int i = 0; i < 50; ++i) spoken += notice.look(remote += 1000, local += i % 2 == 0 ? 60 : 20).has_value();
  EXPECT_EQ(spoken, 1);
}

}  // namespace
}  // namespace kvasir::plugin
