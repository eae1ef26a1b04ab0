#include "base/log_limit.h"

#include <gtest/gtest.h>

#include <vector>

namespace kvasir {
namespace {

constexpr TimePoint kStart{std::chrono::hours(1)};

TEST(LogLimit, SoManyAtOnceThenSoManyASecond) {
  LogLimit limit;
  std::uint32_t written = 0;
  for (int i = 0; i < 1000; ++i) written += limit.take(kStart).has_value();
  EXPECT_EQ(written, kLogLinesAtOnce);
  EXPECT_FALSE(limit.take(kStart + kLogLineEvery / 2));
  EXPECT_EQ(limit.take(kStart + kLogLineEvery), " (941 lines before this one were left out)");
  EXPECT_FALSE(limit.take(kStart + kLogLineEvery));
  // After quiet as many as at the start, and no more.
  written = 0;
  for (int i = 0; i < 1000; ++i) written += limit.take(kStart + std::chrono::hours(5)).has_value();
  EXPECT_EQ(written, kLogLinesAtOnce);
}

TEST(LogLimit, QuietLogsAreLeftAlone) {
  LogLimit limit;
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(limit.take(kStart + i * kLogLineEvery), "");
}

TEST(LogLimit, OfAFunction) {
  std::vector<std::string> lines;
  const LogFunction log = limited_log([&](const std::string& line) { lines.push_back(line); });
  const LogFunction copy = log;  // shares the bound
  const TimePoint begun = monotonic_now();
  for (int i = 0; i < 500; ++i) log("a"), copy("b");
  EXPECT_GE(lines.size(), kLogLinesAtOnce);
  EXPECT_LE(lines.size(), kLogLinesAtOnce + static_cast<std::size_t>((monotonic_now() - begun) / kLogLineEvery) + 1);
  EXPECT_EQ(lines[1], "b");
}

}  // namespace
}  // namespace kvasir
