// A worker on a loopback port: its answers, and who may connect.
#include "worker/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "net/tls_identity.h"
#include "worker/server_fixture.h"

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

}  // namespace
}  // namespace kvasir::worker
