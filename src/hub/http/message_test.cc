// Targets and ranges, without sockets.

#include <gtest/gtest.h>

#include "hub/http/message.h"
#include "hub/http/range.h"

namespace kvasir::hub {
namespace {

TEST(Target, IsSplitAndDecoded) {
  Request request;
  ASSERT_TRUE(parse_target("/api/models/a%20b/manifest?layers=0:2&x=%3d&flag", request));
  EXPECT_EQ(request.path, (std::vector<std::string>{"api", "models", "a b", "manifest"}));
  EXPECT_EQ(request.query.at("layers"), "0:2");
  EXPECT_EQ(request.query.at("x"), "=");
  EXPECT_EQ(request.query.at("flag"), "");
}

TEST(Target, WhatLeadsElsewhereIsRefused) {
  for (const char* target : {"", "api", "/a/../b", "/a/%2e%2e/b", "/a/./b", "/a%2fb", "/a%5cb", "/a%00b", "/a%0ab",
                             "/a%zz", "/a%2", "/a%", "/a?x=1&x=2", "/a?x=%", "/a\x7f"}) {
    Request request;
    EXPECT_FALSE(parse_target(target, request)) << target;
  }
  Request request;
  std::string many = "/a?";
  for (int i = 0; i < 100; ++i) many += "p" + std::to_string(i) + "=1&";
  EXPECT_FALSE(parse_target(many, request));
}

using Ranges = std::vector<ByteRange>;

TEST(Range, ReadsWhatTheStandardAllows) {
  EXPECT_EQ(**parse_range("bytes=0-0", 100), (Ranges{{0, 1}}));
  EXPECT_EQ(**parse_range("bytes=10-", 100), (Ranges{{10, 100}}));
  EXPECT_EQ(**parse_range("bytes=-5", 100), (Ranges{{95, 100}}));
  EXPECT_EQ(**parse_range("bytes=-500", 100), (Ranges{{0, 100}}));
  EXPECT_EQ(**parse_range("bytes=90-500", 100), (Ranges{{90, 100}}));
  EXPECT_EQ(**parse_range("bytes= 0-1 , 5-6,200-300", 100), (Ranges{{0, 2}, {5, 7}}));
  EXPECT_EQ(**parse_range("bytes=50-59,0-9", 100), (Ranges{{50, 60}, {0, 10}}));  // in the order asked for
  EXPECT_EQ(**parse_range("bytes=5-99999999999999999999999", 100), (Ranges{{5, 100}}));
  EXPECT_FALSE(parse_range("lines=0-5", 100)->has_value());
}

TEST(Range, RefusesTheRest) {
  for (const char* header :
       {"bytes=", "bytes=-", "bytes=a-b", "bytes=5-2", "bytes=100-", "bytes=100-200", "bytes=-0", "bytes=0-10,5-20",
        "bytes=0-,-1", "bytes=1 -2", "bytes=0-1;2-3", "bytes=18446744073709551615-",
        "bytes=18446744073709551616-18446744073709551617", "bytes=--5", "bytes=0-1,,2-3"})
    EXPECT_FALSE(parse_range(header, 100)) << header;
  std::string many = "bytes=";
  for (int i = 0; i < 100; ++i) many += std::to_string(2 * i) + "-" + std::to_string(2 * i) + ",";
  EXPECT_FALSE(parse_range(many + "999-999", 1000));
  EXPECT_FALSE(parse_range("bytes=0-0", 0));
}

}  // namespace
}  // namespace kvasir::hub
