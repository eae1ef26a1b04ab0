#include "net/relay_url.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace kvasir::net {
namespace {

TEST(RelayUrl, Forms) {
  const auto https = parse_relay_url("https://hub.example/");
  ASSERT_TRUE(https);
  EXPECT_TRUE(https->encrypted);
  EXPECT_EQ(https->where, (HostPort{"hub.example", 443}));
  EXPECT_EQ(parse_relay_url("wss://[2001:db8::1]:8443")->where, (HostPort{"2001:db8::1", 8443}));
  EXPECT_EQ(parse_relay_url("https://[2001:db8::1]")->where, (HostPort{"2001:db8::1", 443}));
  const auto plain = parse_relay_url("http://127.0.0.1:8080");
  ASSERT_TRUE(plain);
  EXPECT_FALSE(plain->encrypted);
  for (const char* wrong : {"", "hub.example", "ftp://hub.example", "https://", "https://hub.example/path",
                            "https://user@hub.example", "https://hub.example:0", "https://hub.example:port"})
    EXPECT_FALSE(parse_relay_url(wrong)) << wrong;
}

TEST(RelayUrl, PlainOnLoopbackOnly) {
  for (const char* wrong : {"http://hub.example", "ws://10.0.0.1:8080", "ws://127.example.org", "http://127.0.0.1.example.org"}) {
    const auto refused = parse_relay_url(wrong);
    ASSERT_FALSE(refused) << wrong;
    EXPECT_NE(refused.error().message.find("in the clear"), std::string::npos);
  }
  EXPECT_TRUE(parse_relay_url("ws://localhost:1"));
  EXPECT_TRUE(parse_relay_url("ws://[::1]:1"));
}

TEST(Proxy, Forms) {
  EXPECT_EQ(parse_proxy("http://proxy:3128/")->where, (HostPort{"proxy", 3128}));
  EXPECT_EQ(parse_proxy("proxy")->where, (HostPort{"proxy", 1080}));
  const auto named = parse_proxy("HTTP://user:s3cret@proxy.example:8080");
  ASSERT_TRUE(named);
  EXPECT_EQ(named->credentials, "user:s3cret");
  EXPECT_EQ(named->where, (HostPort{"proxy.example", 8080}));
  for (const char* wrong : {"socks5://proxy:1080", "https://proxy", "http://user:s3cret@proxy:0", "http://"}) {
    const auto refused = parse_proxy(wrong);
    ASSERT_FALSE(refused) << wrong;
    EXPECT_EQ(refused.error().message.find("s3cret"), std::string::npos);
  }
}

TEST(Proxy, Exceptions) {
  EXPECT_TRUE(is_excepted("hub.example", "other,hub.example"));
  EXPECT_TRUE(is_excepted("hub.example", "example"));
  EXPECT_TRUE(is_excepted("a.hub.example", " .hub.example , x"));
  EXPECT_TRUE(is_excepted("anything", "*"));
  EXPECT_FALSE(is_excepted("hub.example", ""));
  EXPECT_FALSE(is_excepted("hub.example", "ub.example"));
  EXPECT_FALSE(is_excepted("hub.example", "a.hub.example"));
}

TEST(Proxy, FromTheEnvironment) {
  for (const char* name : {"https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"}) ::unsetenv(name);
  EXPECT_FALSE(proxy_from_environment("hub.example")->has_value());
  ::setenv("https_proxy", "http://proxy:3128", 1);
  EXPECT_EQ((*proxy_from_environment("hub.example"))->where.port, 3128);
  EXPECT_FALSE(proxy_from_environment("127.0.0.1")->has_value());
  ::setenv("no_proxy", "example", 1);
  EXPECT_FALSE(proxy_from_environment("hub.example")->has_value());
  ::unsetenv("https_proxy");
  ::unsetenv("no_proxy");
}

}  // namespace
}  // namespace kvasir::net
