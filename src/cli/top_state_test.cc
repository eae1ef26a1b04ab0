#include "cli/top_state.h"

#include <gtest/gtest.h>

namespace kvasir::cli {
namespace {

bool feed(TopState& state, std::string_view text, std::size_t piece = 7) {
  for (std::size_t at = 0; at < text.size(); at += piece) {
    const std::string_view part = text.substr(at, piece);
    if (!state.feed(part.data(), part.size())) return false;
  }
  return true;
}

constexpr std::string_view kStart =
    "event: hello\ndata: "
    "{\"version\":\"1\",\"models\":[{\"name\":\"m\"},{\"name\":\"n\"}],\"model\":\"m\",\"known\":true,"
    "\"n_expert\":[4,0,4]}\n\n: \n\n"
    "event: coverage\ndata: "
    "{\"layers\":[[0,[[0,2,2,0,2,0.0],[2,3,1,0,2,0.5],[3,4,0,1,2,0.5]]],[2,[[0,4,1,0,4,0.75]]]]}\n\n"
    "event: workers\ndata: {\"total\":7,\"workers\":[{\"id\":\"lap\\u001b[31mtop\",\"state\":\"serving\",\"experts\":4,"
    "\"speed\":10,\"latency_us\":1500,\"path\":\"direct\"}]}\n\n"
    "event: traffic\ndata: {\"rounds\":12.5,\"tokens\":3,\"backbones\":1,\"local\":0.25}\n\n"
    "event: samples\ndata: {\"samples\":[{\"n\":1,\"rounds\":2},{\"n\":2,\"rounds\":3}]}\n\n"
    "event: latency\ndata: {\"layers\":[[0,9,100,200],[2,9,150,900]]}\n\n";

TEST(Top, EventsMakeAPicture) {
  TopState state;
  ASSERT_TRUE(feed(state, kStart));
  EXPECT_TRUE(state.complete());
  EXPECT_EQ(state.models.size(), 2u);
  using enum Cover;
  EXPECT_EQ(state.cells[0], (std::vector<Cover>{kFull, kFull, kPart, kNone}));
  EXPECT_EQ(state.cells[2], std::vector<Cover>(4, kScarce));
  EXPECT_EQ(state.sum().experts, 8u);
  EXPECT_EQ(state.sum().full, 2u);
  EXPECT_EQ(state.sum().none, 1u);
  EXPECT_EQ(state.replicas_missing, 1u + 2 + 4 * 3);
  ASSERT_EQ(state.workers.size(), 1u);
  EXPECT_EQ(state.workers[0].id, "lap[31mtop");  // nothing in a name steers the terminal
  EXPECT_EQ(state.workers[0].latency_us, 1500);
  EXPECT_EQ(state.traffic.tokens, 3);
  EXPECT_EQ(state.rounds, (std::deque<double>{2, 3}));
  EXPECT_EQ((*state.slowest_layer)[0], 2);
  // A change replaces whole layers; another model begins anew.
  ASSERT_TRUE(feed(state, "event: coverage\ndata: {\"layers\":[[0,[[0,4,2,0,2,0]]]]}\n\n"));
  EXPECT_EQ(state.sum().full, 4u);
  EXPECT_EQ(state.replicas_missing, 12u);
  ASSERT_TRUE(feed(state, "event: hello\ndata: {\"model\":\"n\",\"known\":true,\"n_expert\":[2]}\n\n"));
  EXPECT_EQ(state.sum().experts, 2u);
  EXPECT_TRUE(state.rounds.empty());
}

TEST(Top, StrangeEventsDoNoHarm) {
  TopState state;
  ASSERT_TRUE(feed(state, kStart, 1));
  for (const char* data :
       {"{}", "{\"layers\":7}", "{\"layers\":[[9,[]],[0],[0,[[0,99999999,1,1,1,1]]],[0,[[\"a\",1,1,1,1]]]]}",
        "{\"workers\":[1,{}]}", "{\"samples\":[null]}", "{\"n_expert\":[-1,\"x\"]}"})
    for (const char* name : {"hello", "coverage", "workers", "traffic", "samples", "latency", "of a later version"})
      EXPECT_TRUE(feed(state, std::string("event: ") + name + "\ndata: " + data + "\n\n")) << name << data;
  EXPECT_FALSE(feed(state, "event: hello\ndata: nonsense\n\n"));
}

}  // namespace
}  // namespace kvasir::cli
