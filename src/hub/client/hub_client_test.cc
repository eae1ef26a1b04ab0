#include "hub/client/hub_client.h"

#include <gtest/gtest.h>

#include <format>
#include <thread>

#include "net/connect.h"

namespace kvasir::hub {
namespace {

using namespace std::chrono_literals;

TEST(HubAddress, KeepsTheTokenOffTheNetwork) {
  EXPECT_EQ(check_address({"https://hub.example/", "t", ""})->url, "https://hub.example");
  EXPECT_TRUE(check_address({"http://127.0.0.1:8080", "t", ""}));
  EXPECT_TRUE(check_address({"http://localhost:8080", "t", ""}));
  for (const char* url :
       {"http://hub.example", "http://127.0.0.1.example.com", "http://localhost.example.com", "http://user@127.0.0.1",
        "ftp://hub", "hub.example", "https://", "https://hub/path", "https://a b"})
    EXPECT_FALSE(check_address({url, "t", ""})) << url;
  EXPECT_FALSE(check_address({"https://hub.example", "", ""}));
  EXPECT_FALSE(check_address({"https://hub.example", "a\r\nX: y", ""}));
}

// The hub's long polls last half a minute; a program that ends does not wait for them.
TEST(HubClient, ACallThatWaitsCanBeCancelled) {
  net::Listener silent = *net::listen_on({"127.0.0.1", 0});
  auto client = *HubClient::create({std::format("http://127.0.0.1:{}", silent.port), "t", ""});
  const TimePoint begun = monotonic_now();
  std::jthread later([&] {
    std::this_thread::sleep_for(100ms);
    client->cancel();
  });
  const auto reply = client->get("/api/health");
  ASSERT_FALSE(reply);
  EXPECT_EQ(reply.error().action, ErrorAction::kRetryLater);
  EXPECT_LT(monotonic_now() - begun, 10s);
  EXPECT_FALSE(client->get("/api/health"));
}

}  // namespace
}  // namespace kvasir::hub
