// A worker on a loopback port, and peers that behave and misbehave.
#include "worker/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cmath>
#include <cstring>
#include <random>

#include "net/tls_identity.h"
#include "worker/testing.h"

namespace kvasir::worker {
namespace {

using ::testing::HasSubstr;
using testing::direct;
using testing::random_rows;
using testing::TestClient;
using testing::TestServer;
using wire::ErrorCode;
using wire::FrameType;
using wire::Pair;

constexpr std::uint32_t kWidth = 256;

class ServerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = new testing::TempDir;
    testing::make_model(*dir_ / "model.gguf", {});
    testing::make_slice(*dir_ / "model.gguf", "0:2", "1,3:6", *dir_ / "slice.gguf");
    store_ = new SliceStore(testing::load({slice()}));
  }
  static void TearDownTestSuite() {
    delete store_;
    delete dir_;
  }
  static std::string slice() { return *dir_ / "slice.gguf"; }
  static const HeldLayer& layer(std::size_t i = 0) { return *store_->layers()[i]; }
  static wire::Recipe recipe() { return *plain_swiglu_recipe(layer()); }
  static wire::ExecHead head(std::size_t n_rows, std::size_t n_pairs, std::uint32_t recipe_id = 0) {
    return {.recipe_id = recipe_id,
            .n_rows = static_cast<std::uint32_t>(n_rows),
            .n_pairs = static_cast<std::uint32_t>(n_pairs),
            .n_embd = kWidth};
  }
  // Every held expert once per row.
  static std::vector<Pair> all_pairs(std::uint32_t n_rows) {
    std::vector<Pair> pairs;
    for (std::uint32_t row = 0; row < n_rows; ++row)
      for (std::uint32_t expert : {1u, 3u, 4u, 5u}) pairs.push_back({row, expert});
    return pairs;
  }
  // Keeps the engine busy for a while (0.3 s on a fast core).
  static constexpr std::uint32_t kLongRows = 8000;
  static void send_long_request(TestClient& client, std::uint64_t request_id) {
    client.send_exec(request_id, head(kLongRows, kLongRows * 4), all_pairs(kLongRows),
                     random_rows(std::size_t{kLongRows} * kWidth, 1));
  }
  static std::unique_ptr<TestClient> connect(const TestServer& server) {
    auto client = std::make_unique<TestClient>(server.port());
    client->greet();
    client->bind(0, layer().layer_id, recipe());
    return client;
  }
  // Sends until the engine is seen to be busy with someone else's request.
  static void expect_answers(TestClient& client, std::uint64_t request_id) {
    const std::vector<float> x = random_rows(kWidth, 2);
    const std::vector<Pair> pairs = all_pairs(1);
    client.send_exec(request_id, head(1, pairs.size()), pairs, x);
    EXPECT_EQ(client.result(request_id), direct(layer(), recipe(), pairs, x));
  }

  static testing::TempDir* dir_;
  static SliceStore* store_;
};
testing::TempDir* ServerTest::dir_ = nullptr;
SliceStore* ServerTest::store_ = nullptr;

TEST_F(ServerTest, AnswersHaveTheEnginesBits) {
  TestServer server({slice()});
  TestClient client(server.port());
  const wire::Holdings holdings = client.greet();
  ASSERT_EQ(holdings.entries.size(), 2u);
  EXPECT_EQ(holdings.entries[0].layer_id, layer(0).layer_id);
  EXPECT_EQ(format_ranges(holdings.entries[1].experts), "1,3:6");
  client.bind(0, layer(0).layer_id, recipe());
  client.bind(7, layer(1).layer_id, recipe());
  std::uint64_t id = 100;
  for (std::uint32_t n_rows : {1u, 2u, 9u, 64u}) {
    for (std::uint32_t which : {0u, 1u}) {
      for (wire::Numerics numerics : {wire::Numerics::kExact, wire::Numerics::kInvariant}) {
        const std::vector<float> x = random_rows(std::size_t{n_rows} * kWidth, n_rows);
        std::vector<Pair> pairs = all_pairs(n_rows);
        std::shuffle(pairs.begin(), pairs.end(), std::mt19937(n_rows));
        wire::ExecHead exec = head(n_rows, pairs.size(), which * 7);
        exec.numerics = numerics;
        client.send_exec(++id, exec, pairs, x);
        const std::vector<float> got = client.result(id);
        if (numerics == wire::Numerics::kExact) {
          EXPECT_EQ(got, direct(layer(which), recipe(), pairs, x));
        } else {  // each row as if alone
          ASSERT_EQ(got.size(), pairs.size() * kWidth);
          for (std::size_t i = 0; i < pairs.size(); i += 5) {
            const std::vector<float> alone = direct(layer(which), recipe(), std::span(&pairs[i], 1), x);
            EXPECT_EQ(std::memcmp(alone.data(), &got[i * kWidth], kWidth * sizeof(float)), 0);
          }
        }
      }
    }
  }
  EXPECT_EQ(server.stats().requests, 16u);
  EXPECT_TRUE(server.stop());
}

TEST_F(ServerTest, FastRowsAndWeightedSums) {
  TestServer server({slice()});
  const auto client = connect(server);
  const std::vector<float> x = random_rows(3 * kWidth, 5);
  const std::vector<Pair> pairs = all_pairs(3);
  std::vector<float> weights(pairs.size());
  for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = 0.1f + 0.05f * static_cast<float>(i);
  const std::vector<float> exact = direct(layer(), recipe(), pairs, x);
  double scale = 0;
  for (float v : exact) scale = std::max(scale, std::fabs(double{v}));
  std::uint64_t id = 0;
  for (const auto& [type, tolerance] : {std::pair{wire::RowType::kF32, 1e-6}, {wire::RowType::kF16, 0.01},
                                        {wire::RowType::kBF16, 0.05}, {wire::RowType::kQ8, 0.05}}) {
    wire::ExecHead exec = head(3, pairs.size());
    exec.numerics = wire::Numerics::kFast;
    exec.row_type = exec.result_type = type;
    client->send_exec(++id, exec, pairs, x);
    const std::vector<float> rows = client->result(id);
    ASSERT_EQ(rows.size(), exact.size());
    for (std::size_t i = 0; i < rows.size(); ++i) ASSERT_NEAR(rows[i], exact[i], tolerance * scale);

    exec.result_kind = wire::ResultKind::kWeightedSum;
    client->send_exec(++id, exec, pairs, x, weights);
    const std::vector<float> sums = client->result(id);
    ASSERT_EQ(sums.size(), 3u * kWidth);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      double sum = 0;
      for (std::size_t p = 0; p < pairs.size(); ++p)
        if (pairs[p].row == i / kWidth) sum += double{weights[p]} * exact[p * kWidth + i % kWidth];
      ASSERT_NEAR(sums[i], sum, tolerance * scale * 4);
    }
  }
}

TEST_F(ServerTest, ALongAnswerComesInSeveralFrames) {
  TestServer server({slice()});
  const auto client = connect(server);
  const std::uint32_t n_rows = 5000;  // 20000 result rows of 1 KiB
  const std::vector<float> x = random_rows(std::size_t{n_rows} * kWidth, 5);
  const std::vector<Pair> pairs = all_pairs(n_rows);
  client->send_exec(1, head(n_rows, pairs.size()), pairs, x);
  EXPECT_EQ(client->result(1), direct(layer(), recipe(), pairs, x));
}

// As a backbone sends a prompt: an expert's pairs follow each other.
TEST_F(ServerTest, PiecesOfALongAnswerKeepExpertsWhole) {
  constexpr std::uint32_t kRows = 300;
  TestServer server({slice()});
  const auto client = connect(server);
  const std::vector<float> x = random_rows(std::size_t{kRows} * kWidth, 8);
  std::vector<Pair> pairs = all_pairs(kRows);
  std::ranges::stable_sort(pairs, {}, &Pair::expert);
  const std::vector<float> exact = direct(layer(), recipe(), pairs, x);
  client->send_exec(1, head(kRows, pairs.size()), pairs, x);
  std::uint32_t n_frames = 0;
  std::vector<float> got(exact.size());
  for (bool more = true; more; ++n_frames) {
    const std::optional<wire::FrameHeader> frame = client->next();
    ASSERT_TRUE(frame && frame->type == wire::FrameType::kResult);
    const auto part = wire::decode_result(client->payload());
    ASSERT_TRUE(part);
    EXPECT_EQ(part->head.total_rows, pairs.size());
    ASSERT_LE((part->head.first_row + part->head.n_rows) * std::size_t{kWidth}, got.size());
    std::memcpy(&got[std::size_t{part->head.first_row} * kWidth], part->rows.data(), part->rows.size());
    more = part->head.first_row + part->head.n_rows < part->head.total_rows;
  }
  EXPECT_GT(n_frames, 1u) << "computed in pieces";
  EXPECT_EQ(got, exact);

  // Summed, the pieces make one answer.
  std::vector<float> weights(pairs.size(), 0.5f), sums(std::size_t{kRows} * kWidth, 0.f);
  for (std::size_t i = 0; i < pairs.size(); ++i)
    for (std::uint32_t c = 0; c < kWidth; ++c) sums[pairs[i].row * kWidth + c] += 0.5f * exact[i * kWidth + c];
  wire::ExecHead summed = head(kRows, pairs.size());
  summed.numerics = wire::Numerics::kFast;
  summed.result_kind = wire::ResultKind::kWeightedSum;
  client->send_exec(2, summed, pairs, x, weights);
  const std::vector<float> answer = client->result(2);
  ASSERT_EQ(answer.size(), sums.size());
  for (std::size_t i = 0; i < sums.size(); i += 37) EXPECT_NEAR(answer[i], sums[i], 1e-4);
}

TEST_F(ServerTest, WorksOverTls) {
  const net::TlsIdentity identity = net::make_tls_identity().value();
  ServerOptions options;
  options.tls = net::TlsContext::server(identity).value();
  TestServer server({slice()}, options);
  const net::TlsContext context = net::TlsContext::client().value();
  TestClient client(server.port(), &context, &identity.fingerprint);
  client.greet();
  client.bind(0, layer().layer_id, recipe());
  expect_answers(client, 1);
  const std::uint32_t n_rows = 5000;
  const std::vector<float> x = random_rows(std::size_t{n_rows} * kWidth, 5);
  const std::vector<Pair> pairs = all_pairs(n_rows);
  client.send_exec(2, head(n_rows, pairs.size()), pairs, x);
  EXPECT_EQ(client.result(2), direct(layer(), recipe(), pairs, x));
}

// --- who may connect ----------------------------------------------------------------------

TEST_F(ServerTest, RefusesAnotherVersionTokenOrKernel) {
  ServerOptions options;
  options.token = "open sesame";
  TestServer server({slice()}, options);
  const auto refusal = [&](auto change) {
    wire::Hello hello = testing::backbone_hello();
    hello.token = "open sesame";
    change(hello);
    TestClient client(server.port());
    client.send(FrameType::kHello, 0, hello);
    const wire::ErrorMessage error = client.error(0);
    EXPECT_TRUE(client.closed());
    return error;
  };
  EXPECT_EQ(refusal([](wire::Hello& h) { h.token = "open sesami"; }).code, ErrorCode::kUnauthorized);
  EXPECT_EQ(refusal([](wire::Hello& h) { h.token.clear(); }).code, ErrorCode::kUnauthorized);
  EXPECT_EQ(refusal([](wire::Hello& h) { h.role = wire::Role::kWorker; }).code, ErrorCode::kMalformed);
  const wire::ErrorMessage numerics = refusal([](wire::Hello& h) { h.numerics_id.probe[0] ^= std::byte{1}; });
  EXPECT_EQ(numerics.code, ErrorCode::kNumerics);
  EXPECT_THAT(numerics.message, HasSubstr("probe"));

  TestClient newer(server.port());
  Bytes frame = wire::encode_frame(FrameType::kHello, 0, testing::backbone_hello(), true);
  frame[4] = std::byte{99};
  newer.send(frame);
  const wire::ErrorMessage version = newer.error(0);
  EXPECT_EQ(version.code, ErrorCode::kWrongVersion);
  EXPECT_THAT(version.message, HasSubstr("99"));
  EXPECT_TRUE(newer.closed());

  // Fast pairs with other kernels, but then exact requests are refused one by one.
  wire::Hello other = testing::backbone_hello();
  other.token = "open sesame";
  other.numerics = wire::Numerics::kFast;
  other.numerics_id.cpu_variant = "NEON=1";
  TestClient fast(server.port());
  fast.greet(other);
  fast.bind(0, layer().layer_id, recipe());
  const std::vector<float> x = random_rows(kWidth, 2);
  fast.send_exec(1, head(1, 4), all_pairs(1), x);
  EXPECT_EQ(fast.error(1).code, ErrorCode::kNumerics);
  wire::ExecHead exec = head(1, 4);
  exec.numerics = wire::Numerics::kFast;
  fast.send_exec(2, exec, all_pairs(1), x);
  EXPECT_EQ(fast.result(2).size(), 4u * kWidth);
}

TEST_F(ServerTest, RefusesWhatItDoesNotHoldAndLivesOn) {
  testing::make_model(*dir_ / "other.gguf", {.seed = 9});
  const SliceStore other = testing::load({*dir_ / "other.gguf"});
  TestServer server({slice()});
  TestClient client(server.port());
  client.greet();
  client.bind(1, other.layers()[0]->layer_id, recipe());
  EXPECT_EQ(client.error(1).code, ErrorCode::kUnknownLayer);

  wire::Recipe wide = recipe();
  wide.n_ff = 512;
  client.bind(2, layer().layer_id, wide);
  const wire::ErrorMessage unfit = client.error(2);
  EXPECT_EQ(unfit.code, ErrorCode::kUnsupportedRecipe);
  EXPECT_THAT(unfit.message, HasSubstr("blk.0.ffn_"));
  wire::Recipe biased = recipe();
  biased.down_bias = true;
  client.bind(3, layer().layer_id, biased);
  EXPECT_EQ(client.error(3).code, ErrorCode::kUnsupportedRecipe);
  wire::Recipe fewer = recipe();
  fewer.n_expert = 4;
  client.bind(4, layer().layer_id, fewer);
  EXPECT_EQ(client.error(4).code, ErrorCode::kUnsupportedRecipe);

  const std::vector<float> x = random_rows(kWidth, 2);
  const Pair held{0, 1}, not_held{0, 2}, past_the_end{0, 60000};
  client.send_exec(5, head(1, 1, 1), {&held, 1}, x);
  EXPECT_EQ(client.error(5).code, ErrorCode::kUnknownLayer);
  client.send_exec(15, head(1, 1, 17), {&held, 1}, x);
  EXPECT_EQ(client.error(15).code, ErrorCode::kUnknownRecipe);
  client.bind(0, layer().layer_id, recipe());
  client.send_exec(6, head(1, 1), {&not_held, 1}, x);
  const wire::ErrorMessage absent = client.error(6);
  EXPECT_EQ(absent.code, ErrorCode::kExpertNotHeld);
  EXPECT_EQ(absent.message, "Expert 2 of layer 0 is not held here.");
  client.send_exec(7, head(1, 1), {&past_the_end, 1}, x);
  EXPECT_EQ(client.error(7).code, ErrorCode::kExpertNotHeld);
  expect_answers(client, 8);
}

TEST_F(ServerTest, AnEmptyWorkerGreets) {
  TestServer server({});
  TestClient client(server.port());
  EXPECT_TRUE(client.greet().entries.empty());
}

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
  EXPECT_EQ(load.queue_capacity, 1u);
  second->send_exec(3, head(1, 4), pairs, x);
  EXPECT_EQ(second->error(3).code, ErrorCode::kBusy);
  EXPECT_EQ(first->result(1).size(), std::size_t{kLongRows} * 4 * kWidth);
  EXPECT_EQ(other->result(2).size(), std::size_t{kLongRows} * 4 * kWidth);
  EXPECT_EQ(server.stats().requests_busy, 1u);
  expect_answers(*second, 4);
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

// --- the older framing --------------------------------------------------------------------

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
