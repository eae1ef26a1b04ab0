#include "base/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

namespace kvasir {
namespace {

TEST(Metrics, TheTextFormIsPrometheusOwn) {
  MetricsText metrics;
  metrics.family("kvasir_workers", MetricsText::Type::kGauge, "Workers by state.\nTwo lines, a \\ and a \".");
  metrics.sample(3, {{"model", "a \"b\"\\\n"}, {"state", "serving"}});
  metrics.sample(0.5);
  metrics.counter("kvasir_rounds_total", "Rounds.", 12'345'678'901.0);
  metrics.gauge("kvasir_nan", "Not a number.", std::nan(""));
  metrics.gauge("kvasir_inf", "Infinite.", -INFINITY);
  EXPECT_EQ(metrics.text(),
            "# HELP kvasir_workers Workers by state.\\nTwo lines, a \\\\ and a \".\n"
            "# TYPE kvasir_workers gauge\n"
            "kvasir_workers{model=\"a \\\"b\\\"\\\\\\n\",state=\"serving\"} 3\n"
            "kvasir_workers 0.5\n"
            "# HELP kvasir_rounds_total Rounds.\n"
            "# TYPE kvasir_rounds_total counter\n"
            "kvasir_rounds_total 12345678901\n"
            "# HELP kvasir_nan Not a number.\n# TYPE kvasir_nan gauge\nkvasir_nan NaN\n"
            "# HELP kvasir_inf Infinite.\n# TYPE kvasir_inf gauge\nkvasir_inf -Inf\n");
}

TEST(Metrics, WrongNamesAreBugs) {
  MetricsText metrics;
  EXPECT_DEATH(metrics.counter("kvasir_rounds", "x", 1), "_total");
  EXPECT_DEATH(metrics.gauge("Kvasir rounds", "x", 1), "is_name");
}

TEST(Metrics, TheProcessItself) {
  MetricsText metrics;
  metrics.process();
  for (const char* name : {"process_cpu_seconds_total ", "process_resident_memory_bytes ",
                           "process_start_time_seconds ", "process_open_fds "}) {
    const std::size_t at = metrics.text().find(std::string("\n") + name);
    ASSERT_NE(at, std::string::npos) << name;
    EXPECT_GE(std::strtod(metrics.text().c_str() + at + 1 + std::string(name).size(), nullptr), 0) << name;
  }
  const std::string rss = "\nprocess_resident_memory_bytes ";
  EXPECT_GT(std::strtod(metrics.text().c_str() + metrics.text().find(rss) + rss.size(), nullptr), 1e6);
}

TEST(Metrics, AFileIsReplacedWhole) {
  const std::string path = testing::TempDir() + "/kvasir-metrics-test";
  EXPECT_TRUE(replace_file(path, "one"));
  EXPECT_TRUE(replace_file(path, "two"));
  std::string text;
  std::ifstream(path) >> text;
  EXPECT_EQ(text, "two");
  EXPECT_FALSE(std::filesystem::exists(path + ".new"));
  EXPECT_FALSE(replace_file("/nonexistent/folder/x", "x"));
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace kvasir
