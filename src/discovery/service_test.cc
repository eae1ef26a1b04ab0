#include "discovery/service.h"

#include <gtest/gtest.h>

namespace kvasir::discovery {
namespace {

TEST(Service, LinksCanBeGivenToACommand) {
  Service hub{Kind::kHub, "Kvasir hub on attic", "192.0.2.7", 8443, {{"version", "0.1.0"}}};
  EXPECT_EQ(hub.link(), "https://192.0.2.7:8443");
  hub.host = "2001:db8::7";
  EXPECT_EQ(hub.link(), "https://[2001:db8::7]:8443");
  hub.text["name"] = "hub.example";
  EXPECT_EQ(hub.link(), "https://hub.example:8443");
  hub.text["name"] = "user@evil/?";
  EXPECT_EQ(hub.link(), "https://[2001:db8::7]:8443");
  Service worker{Kind::kWorker, "Kvasir worker on attic", "192.0.2.7", 7070, {}};
  EXPECT_EQ(worker.link(), "192.0.2.7:7070");
  worker.text["fingerprint"] = "ab12";
  EXPECT_EQ(worker.link(), "192.0.2.7:7070#ab12");
}

TEST(Service, LinesAreReadBack) {
  const Service service{Kind::kWorker, "a \"name\"\n", "192.0.2.7", 7070, {{"fingerprint", "ab12"}}};
  const std::string line = to_line(service);
  EXPECT_EQ(line.find('\n'), line.size() - 1);
  const auto back = from_line(line);
  ASSERT_TRUE(back);
  EXPECT_EQ(*back, service);
  for (const char* wrong : {"", "7", "{}", R"({"kind":"hub","name":1,"host":"h","port":1,"text":{}})"})
    EXPECT_FALSE(from_line(wrong)) << wrong;
}

TEST(Service, WhatStrangersSayIsFitToShow) {
  EXPECT_EQ(plain_text("a\x1b[31mb\nc", 100), "a?[31mb?c");
  EXPECT_EQ(plain_text("abcdef", 3), "abc");
  EXPECT_LE(default_name(Kind::kWorker).size(), kNameBytesMax);
}

TEST(Service, NothingButTheDocumentedKeysIsSaid) {
  EXPECT_EQ(keys_of(Kind::kHub), (std::vector<std::string_view>{"version", "name"}));
  EXPECT_EQ(keys_of(Kind::kWorker), (std::vector<std::string_view>{"version", "fingerprint"}));
}

}  // namespace
}  // namespace kvasir::discovery
