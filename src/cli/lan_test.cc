#include "cli/lan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvasir::cli {
namespace {

using discovery::Kind;
using discovery::Service;
using ::testing::HasSubstr;

Service hub(const char* host) { return {Kind::kHub, std::string("Kvasir hub on ") + host, host, 8443, {}}; }

TEST(ChooseHub, OneThatTheCallerVouchesFor) {
  const Service worker{Kind::kWorker, "Kvasir worker on w", "192.0.2.9", 7070, {}};
  const auto url = choose_hub({worker, hub("192.0.2.7")}, "hub.pem");
  ASSERT_TRUE(url) << url.error().message;
  EXPECT_EQ(*url, "https://192.0.2.7:8443");
  const auto none = choose_hub({worker}, "hub.pem");
  EXPECT_THAT(none.error().message, HasSubstr("none announces itself"));
  const auto two = choose_hub({hub("192.0.2.7"), hub("192.0.2.8")}, "hub.pem");
  EXPECT_THAT(two.error().message, HasSubstr("https://192.0.2.8:8443"));
}

// Whoever announces a hub could have a good certificate of its own, and collect tokens.
TEST(ChooseHub, ATokenGoesToNoStranger) {
  const auto url = choose_hub({hub("192.0.2.7")}, "");
  ASSERT_FALSE(url);
  EXPECT_THAT(url.error().message, HasSubstr("https://192.0.2.7:8443"));
  EXPECT_THAT(url.error().message, HasSubstr("--ca-file"));
}

}  // namespace
}  // namespace kvasir::cli
