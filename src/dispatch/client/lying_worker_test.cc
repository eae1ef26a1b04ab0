// Workers that answer in the right shape with wrong numbers, over loopback. Class of attack: a
// replayed or corrupted answer.
#include <gtest/gtest.h>

#include <cmath>

#include "dispatch/client/check_rows.h"
#include "dispatch/client/row_copy.h"
#include "dispatch/client/test_client.h"

namespace kvasir::dispatch {
namespace {

using namespace std::chrono_literals;
constexpr std::uint32_t kWidth = 32;
constexpr std::uint32_t kExperts = 64;
constexpr Lie kLies[] = {Lie::kFlippedBit, Lie::kNormOff1, Lie::kNormOff5, Lie::kOlderAnswer, Lie::kOtherExpert, Lie::kHuge};

const TestLayer kLayer{.id = {std::byte{7}}, .width = kWidth, .n_expert = kExperts};

std::unique_ptr<FakeWorker> worker() { return make_worker(kLayer, 0, kExperts); }

struct Client : TestClient {
  Client(const std::vector<std::unique_ptr<FakeWorker>>& workers, LocalPolicy policy, double share,
         wire::Numerics numerics = wire::Numerics::kExact) {
    Options options;
    for (const auto& w : workers) options.workers.push_back(at(*w));
    options.local = policy;
    options.numerics = numerics;
    options.spot_check = share;
    start(kLayer, std::move(options));
  }

  // One round of 4 rows through 8 experts each; how many values are not the right ones.
  std::size_t wrong_values() {
    draw(4, kWidth);
    pick(4, 8, 11, kExperts);
    out.assign(pairs.size() * kWidth, 0);
    const Round r{.layer = layer, .rows = rows.data(), .row_stride = kWidth, .n_rows = 4, .pairs = pairs, .out = out.data()};
    const auto right = [&](wire::Pair pair, std::uint32_t j) { return fake_expert(rows[pair.row * kWidth + j], pair.expert); };
    const Status status = driver->run(r, [&](const Round& what, std::span<const std::uint32_t> indices) -> Status {
      for (std::uint32_t i : indices)
        for (std::uint32_t j = 0; j < kWidth; ++j) what.out[i * kWidth + j] = right(what.pairs[i], j);
      return {};
    });
    EXPECT_TRUE(status) << status.error().message;
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < pairs.size(); ++i)
      for (std::uint32_t j = 0; j < kWidth; ++j) wrong += out[i * kWidth + j] != right(pairs[i], j);
    return wrong;
  }
};

std::vector<std::unique_ptr<FakeWorker>> workers(std::size_t n) {
  std::vector<std::unique_ptr<FakeWorker>> out;
  while (out.size() < n) out.push_back(worker());
  return out;
}

TEST(LyingWorker, WithEveryAnswerCheckedHereNoValueDiffers) {
  for (const Lie lie : kLies) {
    auto all = workers(1);
    all[0]->faults.lie = lie;
    Client client(all, LocalPolicy::kFallback, 1.0);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(client.wrong_values(), 0u) << static_cast<int>(lie);
    const Stats stats = client.dispatcher->stats();
    EXPECT_EQ(stats.workers_up, 0u);
    if (lie == Lie::kHuge) {  // found without a check
      EXPECT_EQ(stats.invalid_answers, 1u);
    } else {
      EXPECT_GT(stats.spot_wrong, 0u) << static_cast<int>(lie);
      EXPECT_TRUE(client.logged("gave a wrong answer in layer 5, expert ")) << (client.lines.empty() ? "" : client.lines.back());
    }
  }
}

TEST(LyingWorker, WithEveryAnswerCheckedByOthersNoValueDiffers) {
  for (const Lie lie : kLies) {
    auto all = workers(3);
    all[1]->faults.lie = lie;
    Client client(all, LocalPolicy::kNever, 1.0);
    for (int i = 0; i < 6; ++i) EXPECT_EQ(client.wrong_values(), 0u) << static_cast<int>(lie);
    EXPECT_EQ(client.dispatcher->stats().workers_up, 2u) << static_cast<int>(lie);
    EXPECT_EQ(client.dispatcher->stats().pairs_local, 0u);
  }
}

TEST(LyingWorker, HonestWorkersAreNeverBlamed) {
  auto all = workers(2);
  Client client(all, LocalPolicy::kFallback, 1.0);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(client.wrong_values(), 0u);
  const Stats stats = client.dispatcher->stats();
  EXPECT_EQ(stats.spot_wrong, 0u);
  EXPECT_EQ(stats.spot_pairs, 20u * 32);
  EXPECT_GT(stats.spot_ns_sum, 0u);
  EXPECT_EQ(stats.workers_up, 2u);
}

TEST(RowsAgree, ExactMeansEveryBitAndFastATolerance) {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  std::vector<float> a(256), b;
  for (float& value : a) value = normal(rng);
  const auto agree = [&](wire::Numerics numerics) { return rows_agree(numerics, a.data(), b.data(), a.size()); };
  b = a;
  b[17] = std::nextafter(b[17], 9.f);
  EXPECT_FALSE(agree(wire::Numerics::kExact));
  EXPECT_FALSE(agree(wire::Numerics::kInvariant));
  EXPECT_TRUE(agree(wire::Numerics::kFast));
  for (std::size_t i = 0; i < b.size(); ++i) b[i] = a[i] + 0.06f * normal(rng);  // cosine 0.998
  EXPECT_TRUE(agree(wire::Numerics::kFast));
  for (std::size_t i = 0; i < b.size(); ++i) b[i] = 1.05f * a[i];
  EXPECT_FALSE(agree(wire::Numerics::kFast));
  for (std::size_t i = 0; i < b.size(); ++i) b[i] = -a[i];
  EXPECT_FALSE(agree(wire::Numerics::kFast));
  a.assign(a.size(), 0.f);
  b.assign(b.size(), 1e-9f);
  EXPECT_TRUE(agree(wire::Numerics::kFast));
}

TEST(SaneRows, EndBelowTwoToTheFortieth) {
  std::vector<float> row(13, 1e6f), out(13);
  const auto sane = [&] { return copy_sane(reinterpret_cast<const std::byte*>(row.data()), out.data(), row.size()); };
  EXPECT_TRUE(sane());
  for (const float bad : {0x1p40f, -0x1p40f, std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN()}) {
    for (const std::size_t at : {0, 7, 8, 12}) {
      row.assign(row.size(), -1e6f);
      row[at] = bad;
      EXPECT_FALSE(sane()) << bad;
      EXPECT_FALSE(all_sane(row)) << bad;
    }
  }
  row.assign(row.size(), std::nextafter(-kSaneMax, 0.f));
  EXPECT_TRUE(sane());
  EXPECT_TRUE(all_sane(row));
}

}  // namespace
}  // namespace kvasir::dispatch
