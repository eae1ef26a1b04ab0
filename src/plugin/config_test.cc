#include "plugin/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <map>

#include "plugin/ggml_abi.h"

namespace kvasir::plugin {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

struct Loaded {
  Result<Config> config;
  std::vector<std::string> warnings;
};

Loaded load(const std::map<std::string, std::string, std::less<>>& environment) {
  std::vector<std::string> present, warnings;
  for (const auto& [name, value] : environment) present.push_back(name);
  const auto get = [&](std::string_view name) -> std::optional<std::string> {
    const auto it = environment.find(name);
    return it == environment.end() ? std::nullopt : std::optional(it->second);
  };
  Result<Config> config = load_config(get, present, warnings);
  return {std::move(config), std::move(warnings)};
}

std::string error_of(const std::map<std::string, std::string, std::less<>>& environment) {
  const Loaded loaded = load(environment);
  return loaded.config ? "" : loaded.config.error().message;
}

TEST(Config, DefaultsAreExactWithFallback) {
  const Loaded loaded = load({});
  ASSERT_TRUE(loaded.config);
  EXPECT_EQ(loaded.config->dispatch.numerics, wire::Numerics::kExact);
  EXPECT_EQ(loaded.config->dispatch.local, dispatch::LocalPolicy::kFallback);
  EXPECT_EQ(loaded.config->replica, Replica::kMmap);
  EXPECT_TRUE(loaded.warnings.empty());
}

TEST(Config, WithoutAReplicaNothingIsComputedHere) {
  const Loaded loaded = load({{"KVASIR_REPLICA", "none"}, {"KVASIR_WORKERS", "a:1"}, {"KVASIR_NO_REPLICA_MS", "2500"}});
  ASSERT_TRUE(loaded.config) << loaded.config.error().message;
  EXPECT_EQ(loaded.config->replica, Replica::kNone);
  EXPECT_EQ(loaded.config->dispatch.local, dispatch::LocalPolicy::kNever);
  EXPECT_EQ(loaded.config->dispatch.no_replica_wait, std::chrono::milliseconds(2500));
  EXPECT_THAT(error_of({{"KVASIR_REPLICA", "none"}, {"KVASIR_LOCAL", "fallback"}}), HasSubstr("KVASIR_LOCAL=fallback"));
  EXPECT_THAT(error_of({{"KVASIR_REPLICA", "none"}, {"KVASIR_UPLOAD", "1"}}), HasSubstr("KVASIR_UPLOAD"));
  EXPECT_THAT(error_of({{"KVASIR_REPLICA", "none"}}), HasSubstr("KVASIR_WORKERS"));
  EXPECT_THAT(error_of({{"KVASIR_SPIN_US", "10001"}}), HasSubstr("microseconds from 0 to 10000"));
}

TEST(Config, HotExpertsHaveABudgetAndNeedLocalCompute) {
  for (const auto& [text, bytes] : std::map<std::string, std::uint64_t>{{"1000", 1000}, {"3K", 3072}, {"512M", 512ull << 20}, {"4G", 4ull << 30}})
    EXPECT_EQ(load({{"KVASIR_HOT", text}}).config->dispatch.hot_bytes_max, bytes);
  for (const char* text : {"-1", "4T", "G", "4 G", "99999999999G"}) EXPECT_THAT(error_of({{"KVASIR_HOT", text}}), HasSubstr("512M or 4G")) << text;
  EXPECT_THAT(error_of({{"KVASIR_HOT", "1G"}, {"KVASIR_LOCAL", "never"}, {"KVASIR_WORKERS", "a:1"}}), HasSubstr("KVASIR_LOCAL=fallback"));
}

TEST(Config, NarrowRowsBelongToFast) {
  for (const char* numerics : {"exact", "invariant"})
    EXPECT_THAT(error_of({{"KVASIR_WIRE", "f16"}, {"KVASIR_NUMERICS", numerics}}), HasSubstr("KVASIR_NUMERICS=fast"));
  EXPECT_THAT(error_of({{"KVASIR_WIRE", "f32"}}), HasSubstr("KVASIR_NUMERICS=exact promises"));
  EXPECT_THAT(error_of({{"KVASIR_WIRE", "auto"}}), HasSubstr("KVASIR_NUMERICS=exact promises"));
  EXPECT_TRUE(load({{"KVASIR_WIRE", "auto"}, {"KVASIR_NUMERICS", "fast"}}).config->dispatch.wire_auto);
  const Loaded loaded = load({{"KVASIR_WIRE", "bf16"}, {"KVASIR_NUMERICS", "fast"}});
  ASSERT_TRUE(loaded.config);
  EXPECT_EQ(loaded.config->dispatch.row_type, wire::RowType::kBF16);
  EXPECT_EQ(loaded.config->dispatch.result_type, wire::RowType::kBF16);
}

TEST(Config, UnknownVariableIsAWarning) {
  const Loaded loaded = load({{"KVASIR_WORKER", "a:1"}});
  ASSERT_TRUE(loaded.config);
  EXPECT_THAT(loaded.warnings, Contains(HasSubstr("KVASIR_WORKER is not known")));
}

TEST(Config, WrongValuesSayWhatIsAllowed) {
  EXPECT_THAT(error_of({{"KVASIR_LOCAL", "always"}}), HasSubstr("fallback, never, only"));
  EXPECT_THAT(error_of({{"KVASIR_REPLICA", "disk"}}), HasSubstr("mmap, ram, none"));
  EXPECT_THAT(error_of({{"KVASIR_NUMERICS", "quick"}}), HasSubstr("exact, invariant, fast"));
  EXPECT_THAT(error_of({{"KVASIR_NUMERICS", "fast"}, {"KVASIR_WIRE", "f8"}}), HasSubstr("auto, f32, f16, bf16, q8"));
  EXPECT_THAT(error_of({{"KVASIR_CONNECT_MS", "5s"}}), HasSubstr("milliseconds"));
  EXPECT_THAT(error_of({{"KVASIR_CONNECT_MS", "60001"}}), HasSubstr("60000"));
  EXPECT_THAT(error_of({{"KVASIR_LOCAL", "never"}}), HasSubstr("KVASIR_WORKERS"));
  EXPECT_NE(error_of({{"KVASIR_WORKERS", "no-port"}}), "");
}

TEST(Config, AHubTakesThePlaceOfAList) {
  const Loaded loaded = load({{"KVASIR_HUB", "https://hub.example/"}, {"KVASIR_TOKEN", "secret"}, {"KVASIR_LOCAL", "never"}});
  ASSERT_TRUE(loaded.config) << loaded.config.error().message;
  EXPECT_EQ(loaded.config->hub->url, "https://hub.example");
  EXPECT_EQ(loaded.config->hub->token, "secret");
  EXPECT_TRUE(loaded.config->dispatch.workers_follow);
  EXPECT_EQ(loaded.config->dispatch.token, "");  // workers never see it
  EXPECT_THAT(error_of({{"KVASIR_HUB", "https://hub.example"}}), HasSubstr("token"));
  EXPECT_THAT(error_of({{"KVASIR_HUB", "http://hub.example"}, {"KVASIR_TOKEN", "t"}}), HasSubstr("in the clear"));
  EXPECT_THAT(error_of({{"KVASIR_HUB", "https://h"}, {"KVASIR_TOKEN", "t"}, {"KVASIR_WORKERS", "a:1"}}), HasSubstr("both"));
  EXPECT_THAT(error_of({{"KVASIR_HUB", "https://h"}, {"KVASIR_TOKEN", "t"}, {"KVASIR_UPLOAD", "1"}}), HasSubstr("UPLOAD"));
}

TEST(Config, FileIsReadAndTheEnvironmentWins) {
  const std::string path = ::testing::TempDir() + "/kvasir-config-test.json";
  std::ofstream(path) << R"({"KVASIR_WORKERS": "127.0.0.1:7001", "KVASIR_LOCAL": "never", "KVASIR_STATS": 1})";
  const Loaded loaded = load({{"KVASIR_CONFIG", path}, {"KVASIR_LOCAL", "fallback"}});
  ASSERT_TRUE(loaded.config) << loaded.config.error().message;
  EXPECT_EQ(loaded.config->dispatch.workers.size(), 1u);
  EXPECT_EQ(loaded.config->dispatch.local, dispatch::LocalPolicy::kFallback);
  EXPECT_TRUE(loaded.config->stats_at_exit);

  std::ofstream(path) << "[]";
  EXPECT_THAT(error_of({{"KVASIR_CONFIG", path}}), HasSubstr("not a JSON object"));
  std::ofstream(path) << R"({"KVASIR_WORKRES": "x"})";
  EXPECT_THAT(error_of({{"KVASIR_CONFIG", path}}), HasSubstr("KVASIR_WORKRES"));
  std::remove(path.c_str());
  EXPECT_THAT(error_of({{"KVASIR_CONFIG", path}}), HasSubstr("cannot read"));
}

TEST(Abi, RefusesAGgmlItDoesNotKnow) {
  EXPECT_TRUE(check_host(kGgmlBackendApi, "0.27.0"));
  EXPECT_TRUE(check_host(kGgmlBackendApi, "0.27.3"));
  const Status newer = check_host(kGgmlBackendApi, "0.28.0");
  ASSERT_FALSE(newer);
  EXPECT_THAT(newer.error().message, HasSubstr("0.28.0"));
  EXPECT_FALSE(check_host(kGgmlBackendApi + 1, "0.27.0"));
  EXPECT_FALSE(check_host(2, "0.21.0"));
}

}  // namespace
}  // namespace kvasir::plugin
