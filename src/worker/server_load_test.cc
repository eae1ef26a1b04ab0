// A worker on a loopback port under load, at its end, and with peers that misbehave.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <random>
#include <sstream>
#include <thread>

#include "spdlog/sinks/ostream_sink.h"
#include "spdlog/spdlog.h"
#include "worker/server_fixture.h"

namespace kvasir::worker {
namespace {

using testing::direct;
using testing::random_rows;
using testing::TestClient;
using testing::TestServer;
using wire::ErrorCode;
using wire::FrameType;
using wire::Pair;

// --- load ---------------------------------------------------------------------------------

TEST_F(ServerTest, AFullQueueIsBusyAndPingsAreAnsweredMeanwhile) {
  ServerOptions options;
  options.queue = 1;
  TestServer server({slice()}, options);
  const auto first = connect(server), other = connect(server), second = connect(server), control = connect(server);
  const std::vector<float> x = random_rows(kWidth, 2);
  const std::vector<Pair> pairs = all_pairs(1);
  // One long request runs and one waits: for as long as the first takes, a third is refused.
  send_long_request(*first, 1);
  send_long_request(*other, 2);
  wire::Pong load;
  for (std::uint64_t id = 0; id < 100'000 && load.queued == 0; ++id) {
    control->send(FrameType::kPing, id, wire::Ping{.sent_ns = id});
    const auto pong = control->next();
    ASSERT_TRUE(pong && pong->type == FrameType::kPong);
    EXPECT_EQ(pong->request_id, id);
    load = wire::decode_pong(control->payload()).value();
    EXPECT_EQ(load.sent_ns, id);
  }
  EXPECT_EQ(load.queued, 1u);
  EXPECT_EQ(load.wait_us, 0u) << "nothing was measured yet";
  second->send_exec(3, head(1, 4), pairs, x);
  EXPECT_EQ(second->error(3).code, ErrorCode::kBusy);
  EXPECT_EQ(first->result(1).size(), std::size_t{kLongRows} * 4 * kWidth);
  EXPECT_EQ(other->result(2).size(), std::size_t{kLongRows} * 4 * kWidth);
  EXPECT_EQ(server.stats().requests_busy, 1u);
  expect_answers(*second, 4);
}

// A line of requests that are long, by what was measured at the start, is full before their number is.
TEST_F(ServerTest, AdmissionGoesByMeasuredTime) {
  ServerOptions options;
  options.queue_ms = 1000;
  options.tuning.exact.fill(1);  // pairs a second: a thousand times slower than it is
  TestServer server({slice()}, options);
  const auto first = connect(server), other = connect(server), third = connect(server), control = connect(server);
  const auto ping = [&] {
    control->send(FrameType::kPing, 1, wire::Ping{.sent_ns = 1});
    const auto pong = control->next();
    EXPECT_TRUE(pong && pong->type == FrameType::kPong);
    return wire::decode_pong(control->payload()).value();
  };
  EXPECT_EQ(ping().row_us, 1'000'000u) << "known before the first request";
  send_long_request(*first, 1);
  send_long_request(*other, 2);  // one may always wait
  wire::Pong load = ping();
  for (const TimePoint until = monotonic_now() + std::chrono::seconds(20); load.queued == 0 && monotonic_now() < until;) load = ping();
  EXPECT_EQ(load.queued, 1u);
  EXPECT_GT(load.wait_us, 1'000'000u);
  third->send_exec(3, head(1, 4), all_pairs(1), random_rows(kWidth, 2));
  const wire::ErrorMessage busy = third->error(3);
  EXPECT_EQ(busy.code, ErrorCode::kBusy);
  EXPECT_EQ(first->result(1).size(), std::size_t{kLongRows} * 4 * kWidth);
  EXPECT_EQ(other->result(2).size(), std::size_t{kLongRows} * 4 * kWidth);
  EXPECT_LT(ping().row_us, 1'000'000u) << "requests have shown better";
  expect_answers(*third, 4);
}

TEST_F(ServerTest, ManyFramesInOneSegmentAreAllAnswered) {
  TestServer server({slice()});
  const auto client = connect(server);
  Bytes frames;
  constexpr std::uint64_t kPings = 10 * kFramesPerTurn + 3;
  for (std::uint64_t id = 0; id < kPings; ++id) {
    const Bytes ping = wire::encode_frame(FrameType::kPing, id, wire::Ping{.sent_ns = id}, true);
    frames.insert(frames.end(), ping.begin(), ping.end());
  }
  client->send(frames);
  for (std::uint64_t id = 0; id < kPings; ++id) {
    const auto pong = client->next();
    ASSERT_TRUE(pong);
    EXPECT_EQ(pong->request_id, id);
  }
}

TEST_F(ServerTest, ACancelledRequestIsDroppedFromTheQueue) {
  TestServer server({slice()});
  const auto client = connect(server);
  const std::vector<float> x = random_rows(kWidth, 2);
  const std::vector<Pair> pairs = all_pairs(1);
  // In one connection, behind a long request: 2 is cancelled, 3 is not.
  send_long_request(*client, 1);
  client->send_exec(2, head(1, 4), pairs, x);
  client->send_exec(3, head(1, 4), pairs, x);
  client->send(wire::encode_empty_frame(FrameType::kCancel, 2));
  client->send(wire::encode_empty_frame(FrameType::kCancel, 77));  // unknown: nothing happens
  EXPECT_EQ(client->result(1).size(), std::size_t{kLongRows} * 4 * kWidth);
  EXPECT_EQ(client->error(2).code, ErrorCode::kCancelled);
  EXPECT_EQ(client->result(3), direct(layer(), recipe(), pairs, x));
  EXPECT_EQ(server.stats().requests_cancelled, 1u);
}

TEST_F(ServerTest, RequestsPastTheMemoryBudgetAreRefused) {
  ServerOptions options;
  options.request_bytes_max = 1 << 20;
  TestServer server({slice()}, options);
  const auto client = connect(server);
  const std::uint32_t n_rows = 400;  // 1600 result rows of 1 KiB
  client->send_exec(1, head(n_rows, n_rows * 4), all_pairs(n_rows), random_rows(n_rows * kWidth, 1));
  EXPECT_EQ(client->error(1).code, ErrorCode::kBusy);
  for (std::uint64_t id = 2; id < 40; ++id) expect_answers(*client, id);  // the budget is given back each time
}

TEST_F(ServerTest, MoreConnectionsThanAllowedAreToldSo) {
  TestServer server({slice()});
  std::vector<std::unique_ptr<TestClient>> clients;
  for (std::uint32_t i = 0; i < kConnectionsMax; ++i) clients.push_back(connect(server));
  TestClient extra(server.port());
  EXPECT_EQ(extra.error(0).code, ErrorCode::kBusy);
  EXPECT_TRUE(extra.closed());
  clients.pop_back();
  // A place comes free as soon as the thread of the one that left is gone.
  std::unique_ptr<TestClient> next;
  for (int tries = 0; tries < 100 && !next; ++tries) {
    auto candidate = std::make_unique<TestClient>(server.port());
    candidate->send(FrameType::kHello, 0, testing::backbone_hello());
    const auto answer = candidate->next();
    if (answer && answer->type == FrameType::kHello) next = std::move(candidate);
    else std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_TRUE(next);
  expect_answers(*clients[0], 1);
}

// --- the end ------------------------------------------------------------------------------

TEST_F(ServerTest, ADrainFinishesWhatRunsAndTakesNothingNew) {
  TestServer server({slice()});
  const auto client = connect(server), idle = connect(server);
  expect_answers(*client, 1);
  send_long_request(*client, 2);
  // Once it runs, others wait: seen from a second request of the same connection.
  const std::vector<float> x = random_rows(kWidth, 2);
  const std::vector<Pair> pairs = all_pairs(1);
  client->send_exec(3, head(1, 4), pairs, x);
  std::this_thread::sleep_for(std::chrono::milliseconds(150));  // both have arrived
  server.begin_stop();
  EXPECT_EQ(client->result(2).size(), std::size_t{kLongRows} * 4 * kWidth);
  const auto drain = idle->next();
  ASSERT_TRUE(drain);
  EXPECT_EQ(drain->type, FrameType::kDrain);
  idle->send_exec(4, head(1, 4), pairs, x);
  const auto refused = idle->next();
  if (refused) {
    EXPECT_EQ(wire::decode_error(idle->payload())->code, ErrorCode::kDraining);
  }
  EXPECT_TRUE(idle->closed());
  EXPECT_TRUE(server.stop());
  EXPECT_FALSE(net::connect_to({"127.0.0.1", server.port()}, std::chrono::seconds(1)));
}

TEST_F(ServerTest, ADrainWaitsForNoStranger) {
  TestServer server({slice()});
  TestClient silent(server.port());  // has not greeted
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const TimePoint start = monotonic_now();
  EXPECT_TRUE(server.stop());
  EXPECT_LT(monotonic_now() - start, std::chrono::seconds(3));
  EXPECT_TRUE(silent.closed());
}

TEST_F(ServerTest, KilledPeersLeaveNothingBehind) {
  TestServer server({slice()});
  const auto steady = connect(server);
  for (int round = 0; round < 20; ++round) {
    auto victim = connect(server);
    const std::vector<float> x = random_rows(kWidth * 64, 3);
    const std::vector<Pair> pairs = all_pairs(64);
    if (round % 2 == 0) {  // in the middle of a frame
      Bytes frame = wire::encode_exec_prefix(1, head(64, pairs.size()), pairs, {}, std::as_bytes(std::span(x)), true).value();
      victim->send(ByteSpan(frame).first(frame.size() / 2));
    } else {  // with an answer under way
      for (std::uint64_t id = 1; id < 5; ++id) victim->send_exec(id, head(64, pairs.size()), pairs, x);
    }
    victim->shut();
    expect_answers(*steady, static_cast<std::uint64_t>(round) + 1);
  }
  for (int tries = 0; tries < 200 && server.stats().connections_open > 1; ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(server.stats().connections_open, 1u);
}

TEST_F(ServerTest, MalformedFramesCloseThatConnectionOnly) {
  TestServer server({slice()});
  const auto steady = connect(server);
  std::mt19937 rng(8);
  const std::vector<float> x = random_rows(kWidth, 2);
  const std::vector<Pair> pairs = all_pairs(1);
  Bytes good = wire::encode_exec_prefix(1, head(1, 4), pairs, {}, std::as_bytes(std::span(x)), false).value();
  const ByteSpan rows = std::as_bytes(std::span(x));
  good.insert(good.end(), rows.begin(), rows.end());
  for (int round = 0; round < 150; ++round) {
    const auto client = connect(server);
    Bytes bad = good;
    const std::size_t n_flips = 1 + rng() % 4;
    for (std::size_t i = 0; i < n_flips; ++i) {
      // Headers, heads and tables; rows may be anything.
      const std::size_t at = rng() % (wire::kHeaderBytes + wire::kExecHeadBytes + pairs.size() * 8);
      bad[at] ^= static_cast<std::byte>(1 + rng() % 255);
    }
    client->send(bad);
    client->send(wire::encode_frame(FrameType::kPing, 9, wire::Ping{.sent_ns = 4}, true));
    ::shutdown(client->stream().fd(), SHUT_WR);
    while (client->next()) {  // an answer, an ERROR, or nothing: but it ends
    }
  }
  expect_answers(*steady, 1);

  TestClient garbage(server.port());
  garbage.greet();
  Bytes noise(4096);
  for (std::byte& byte : noise) byte = static_cast<std::byte>(rng());
  garbage.send(noise);
  EXPECT_EQ(garbage.error(0).code, ErrorCode::kMalformed);
  EXPECT_TRUE(garbage.closed());
  // A frame that only a worker sends.
  TestClient confused(server.port());
  confused.greet();
  confused.send(FrameType::kHoldings, 3, wire::Holdings{});
  EXPECT_EQ(confused.error(3).code, ErrorCode::kMalformed);
  EXPECT_TRUE(confused.closed());
  expect_answers(*steady, 2);
}

TEST_F(ServerTest, StallsEndInTime) {
  ServerOptions options;
  options.timeouts.hello = std::chrono::milliseconds(200);
  options.timeouts.stall = std::chrono::milliseconds(300);
  options.spin_us = 0;
  TestServer server({slice()}, options);
  const auto steady = connect(server);

  TestClient silent(server.port());
  EXPECT_TRUE(silent.closed());

  const auto half = connect(server);
  const std::vector<float> x = random_rows(kWidth, 2);
  const Bytes frame = wire::encode_exec_prefix(1, head(1, 4), all_pairs(1), {}, std::as_bytes(std::span(x)), true).value();
  half->send(ByteSpan(frame).first(30));
  const TimePoint start = monotonic_now();
  EXPECT_TRUE(half->closed());
  EXPECT_GT(monotonic_now() - start, std::chrono::milliseconds(250));

  // 20 MB of answers that nobody reads, far more than the sockets' buffers hold.
  const auto lazy = connect(server);
  const std::uint32_t n_rows = 5000;
  lazy->send_exec(1, head(n_rows, n_rows * 4), all_pairs(n_rows), random_rows(std::size_t{n_rows} * kWidth, 1));
  for (int tries = 0; tries < 1000 && server.stats().connections_open > 1; ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(server.stats().connections_open, 1u);
  expect_answers(*steady, 1);
}

// A port scan does not fill the disk with lines about it.
TEST_F(ServerTest, LinesAboutStrangersAreLimited) {
  std::ostringstream text;
  const auto former = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>("test", std::make_shared<spdlog::sinks::ostream_sink_mt>(text)));
  const TimePoint begun = monotonic_now();
  {
    TestServer server({slice()});
    for (std::uint32_t i = 0; i < 3 * kLogLinesAtOnce; ++i) {
      TestClient stranger(server.port());
      stranger.send(Bytes(64, std::byte{0xff}));
      EXPECT_TRUE(stranger.closed());
    }
    EXPECT_TRUE(server.stop());
  }
  const auto seconds = static_cast<std::ptrdiff_t>((monotonic_now() - begun) / kLogLineEvery);
  spdlog::set_default_logger(former);
  const std::string lines = text.str();
  const std::ptrdiff_t n = std::ranges::count(lines, '\n');
  EXPECT_GE(n, std::ptrdiff_t{kLogLinesAtOnce});
  EXPECT_LE(n, std::ptrdiff_t{kLogLinesAtOnce} + seconds + 3) << "one a second, and those of the start and the end";
}

}  // namespace
}  // namespace kvasir::worker
