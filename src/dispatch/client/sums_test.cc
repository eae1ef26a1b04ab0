// Weighted sums over sockets. Weights and values are small whole numbers, so that every sum is
// exact whatever its order and a pair that counts twice, or not at all, shows.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "dispatch/client/test_client.h"

namespace kvasir::dispatch {
namespace {

using namespace std::chrono_literals;
constexpr std::uint32_t kWidth = 64;
constexpr std::uint32_t kExperts = 64;

constexpr TestLayer kLayer{.id = {}, .width = kWidth, .n_expert = kExperts};

std::unique_ptr<FakeWorker> worker(std::uint32_t begin, std::uint32_t end, std::uint32_t width = kWidth) {
  return make_worker({.id = {}, .width = width, .n_expert = kExperts}, begin, end);
}

struct Client : TestClient {
  explicit Client(std::initializer_list<FakeWorker*> workers, wire::RowType type, LocalPolicy policy = LocalPolicy::kFallback) {
    Options options;
    for (const FakeWorker* w : workers) options.workers.push_back(at(*w));
    options.local = policy;
    options.numerics = wire::Numerics::kFast;
    options.row_type = options.result_type = type;
    options.connect_wait = 3s;
    start(kLayer, std::move(options));
  }

  // Values of fake_expert: (value + 1/2) in halves, below 2048 halves, which f16 holds exactly.
  Status round(std::uint32_t n_rows, std::uint32_t top_k, float scale = 1) {
    rows.resize(std::size_t{n_rows} * kWidth);
    for (float& value : rows) value = scale * static_cast<float>(std::uniform_int_distribution<int>(-3, 3)(rng));
    pairs.clear();
    weights.clear();
    for (std::uint32_t row = 0; row < n_rows; ++row)
      for (std::uint32_t k = 0; k < top_k; ++k) {
        pairs.push_back({row, (row * 5 + k * 11) % 32});
        weights.push_back(static_cast<float>(1 + k % 2));
      }
    out.assign(std::size_t{n_rows} * kWidth, -1e9f);
    const Round r{.layer = layer, .rows = rows.data(), .row_stride = kWidth, .n_rows = n_rows, .pairs = pairs, .weights = weights, .out = out.data()};
    const Status status = driver->run(r, [&](const Round& what, std::span<const std::uint32_t> indices) -> Status {
      for (std::uint32_t i : indices)
        for (std::uint32_t j = 0; j < kWidth; ++j) what.out[what.pairs[i].row * kWidth + j] += what.weights[i] * value(i, j);
      return {};
    });
    if (!status) return status;
    std::vector<float> want(out.size(), 0.0f);
    for (std::size_t i = 0; i < pairs.size(); ++i)
      for (std::uint32_t j = 0; j < kWidth; ++j) want[pairs[i].row * kWidth + j] += weights[i] * value(i, j);
    EXPECT_EQ(out, want);
    return status;
  }
  float value(std::size_t pair, std::uint32_t j) const { return fake_expert(rows[pairs[pair].row * kWidth + j], pairs[pair].expert); }

  std::vector<float> weights;
};

TEST(Sums, AreTheSameOverOneWorkerTwoOrNone) {
  for (const wire::RowType type : {wire::RowType::kF32, wire::RowType::kF16}) {
    auto a = worker(0, 16), b = worker(16, 32);
    Client client({a.get(), b.get()}, type);
    for (std::uint32_t n_rows : {1u, 3u, 40u}) ASSERT_TRUE(client.round(n_rows, 6));
    EXPECT_EQ(client.stats().pairs_local, 0u);
    b->stop();  // its half is computed here from now on
    for (std::uint32_t n_rows : {1u, 40u}) ASSERT_TRUE(client.round(n_rows, 6));
    EXPECT_GT(client.stats().pairs_local, 0u);
    EXPECT_GT(client.stats().pairs_remote, 44u * 6);
  }
}

TEST(Sums, SurviveEveryFault) {
  auto a = worker(0, 32), b = worker(0, 32), c = worker(8, 24);
  Client client({a.get(), b.get(), c.get()}, wire::RowType::kF32);
  for (int i = 0; i < 40; ++i) ASSERT_TRUE(client.round(2, 6));
  for (int i = 0; i < 8; ++i) {
    a->faults.twice = 1;
    a->faults.rows_per_frame = 1;
    b->faults.close_mid_frame = i % 3 == 0;
    c->faults.busy = 1;
    a->faults.delay_ns = i % 2 == 0 ? 40'000'000 : 0;  // past the first deadline: hedged, and late
    ASSERT_TRUE(client.round(5, 8));
  }
  a->faults.delay_ns = 0;
  c->faults.nan = 1;
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(client.round(3, 8));
}

TEST(Sums, RowsThatOverflowF16TravelWiderOnTheirWayOut) {
  auto a = worker(0, 32);
  Client client({a.get()}, wire::RowType::kF16, LocalPolicy::kNever);
  // 3 * 2^15 is past f16 and exact in bf16; the sums past f16 are asked for again, in f32.
  ASSERT_TRUE(client.round(2, 4, 32768));
  EXPECT_EQ(client.stats().invalid_answers, 0u);
  EXPECT_EQ(client.stats().pairs_local, 0u);
}

TEST(Sums, AreRefusedOutsideFast) {
  auto a = worker(0, 32);
  Options options;
  options.workers = {{"127.0.0.1", a->port(), {}}};
  auto dispatcher = Dispatcher::create(std::move(options)).value();
  wire::Recipe recipe;
  recipe.n_embd = kWidth;
  recipe.n_expert = kExperts;
  const Layer& layer = dispatcher->register_layer({}, 0, recipe);
  std::vector<float> row(kWidth, 1.0f), out(kWidth);
  const std::vector<wire::Pair> pairs = {{0, 1}};
  const std::vector<float> weights = {1.0f};
  const Round round{.layer = &layer, .rows = row.data(), .row_stride = kWidth, .n_rows = 1, .pairs = pairs, .weights = weights, .out = out.data()};
  EXPECT_FALSE(dispatcher->make_driver()->run(round, [](const Round&, std::span<const std::uint32_t>) -> Status { return {}; }));
}

// The budget of a token: one worker, n_embd 3072, top-8, f16.
TEST(Sums, BytesOfATokenAndLayer) {
  constexpr std::uint32_t kWide = 3072;
  auto a = worker(0, 64, kWide);
  Options options;
  options.workers = {{"127.0.0.1", a->port(), {}}};
  options.local = LocalPolicy::kNever;
  options.numerics = wire::Numerics::kFast;
  options.row_type = options.result_type = wire::RowType::kF16;
  auto dispatcher = Dispatcher::create(std::move(options)).value();
  wire::Recipe recipe;
  recipe.n_embd = kWide;
  recipe.n_expert = kExperts;
  const Layer& layer = dispatcher->register_layer({}, 0, recipe);
  auto driver = dispatcher->make_driver();
  const std::vector<float> row(kWide, 0.5f), weights(8, 0.125f);
  std::vector<float> out(kWide);
  std::vector<wire::Pair> pairs;
  for (std::uint32_t k = 0; k < 8; ++k) pairs.push_back({0, k * 7});
  const Round round{.layer = &layer, .rows = row.data(), .row_stride = kWide, .n_rows = 1, .pairs = pairs, .weights = weights, .out = out.data()};
  const auto once = [&] {
    const Stats before = dispatcher->stats();
    EXPECT_TRUE(driver->run(round, [](const Round&, std::span<const std::uint32_t>) -> Status { return {}; }));
    const Stats after = dispatcher->stats();
    return after.bytes_sent - before.bytes_sent + after.bytes_received - before.bytes_received;
  };
  once();  // binds the recipe
  const std::uint64_t bytes = once();
  EXPECT_LE(bytes, 12'600u);
  RecordProperty("bytes_per_token_and_layer", std::to_string(bytes));
}

}  // namespace
}  // namespace kvasir::dispatch
