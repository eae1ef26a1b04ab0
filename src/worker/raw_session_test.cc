// The older framing, at a worker's port.
#include <gtest/gtest.h>

#include <tuple>

#include "worker/server_fixture.h"

namespace kvasir::worker {
namespace {

using testing::direct;
using testing::random_rows;
using testing::TestClient;
using testing::TestServer;
using wire::Pair;

std::vector<float> raw_round(net::Stream& stream, std::int32_t n_used, std::int32_t n_tokens, std::span<const float> cur,
                             std::span<const std::int32_t> sel) {
  Bytes request;
  ByteWriter out(request);
  out.put(n_used);
  out.put(n_tokens);
  out.put_bytes(std::as_bytes(cur));
  out.put_bytes(std::as_bytes(sel));
  net::FrameWriter writer;
  EXPECT_TRUE(send_whole(stream, writer, {}, request));
  std::vector<float> answer(kWidth * sel.size());
  const auto read = read_whole(stream, std::as_writable_bytes(std::span(answer)), monotonic_now() + std::chrono::seconds(20));
  if (!read || !*read) answer.clear();
  return answer;
}

TEST_F(ServerTest, TheOlderFramingGetsTheSameNumbers) {
  ServerOptions options;
  options.raw_framing = true;
  options.raw_layer = 1;
  TestServer server({slice()}, options);
  const auto framed = connect(server);
  TestClient raw(server.port());
  const std::uint32_t ids[] = {1, 3, 4, 5};
  for (std::int32_t n_tokens : {1, 7, 30}) {
    const std::vector<float> x = random_rows(static_cast<std::size_t>(n_tokens) * kWidth, 5);
    std::vector<std::int32_t> sel;
    std::vector<Pair> pairs;
    for (std::uint32_t token = 0; token < static_cast<std::uint32_t>(n_tokens); ++token) {
      for (std::uint32_t u = 0; u < 3; ++u) {
        sel.push_back(static_cast<std::int32_t>((token + u) % 4));
        pairs.push_back({token, ids[(token + u) % 4]});
      }
    }
    EXPECT_EQ(raw_round(raw.stream(), 3, n_tokens, x, sel), direct(layer(1), recipe(), pairs, x));
  }
  expect_answers(*framed, 1);

  const std::vector<float> x = random_rows(kWidth, 5);
  for (const auto& [n_used, n_tokens, id] :
       {std::tuple{1, 1, 4}, {1, 1, -1}, {0, 1, 0}, {-5, 1, 0}, {1, 0, 0}, {1, 1 << 30, 0}, {1 << 30, 1 << 30, 0}}) {
    TestClient bad(server.port());
    const std::int32_t sel = id;
    EXPECT_TRUE(raw_round(bad.stream(), n_used, n_tokens, x, {&sel, 1}).empty()) << n_used << " " << n_tokens << " " << id;
  }
  expect_answers(*framed, 2);
  EXPECT_TRUE(server.stop());
}

TEST_F(ServerTest, TheOlderFramingIsServedOnlyWhereItIsAllowedAndClear) {
  const std::vector<float> x = random_rows(kWidth, 5);
  const std::int32_t sel = 0;
  {
    TestServer server({slice()});
    TestClient raw(server.port());
    EXPECT_TRUE(raw_round(raw.stream(), 1, 1, x, {&sel, 1}).empty());
  }
  ServerOptions options;
  options.raw_framing = true;
  TestServer two_layers({slice()}, options);
  TestClient raw(two_layers.port());
  EXPECT_TRUE(raw_round(raw.stream(), 1, 1, x, {&sel, 1}).empty()) << "which layer?";
}

}  // namespace
}  // namespace kvasir::worker
