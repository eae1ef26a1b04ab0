// A table of workers that changes while rounds run. Every output of every round is checked.
#include <gtest/gtest.h>

#include <atomic>
#include <map>

#include "dispatch/client/test_client.h"
#include "dispatch/core/tuning.h"

namespace kvasir::dispatch {
namespace {

using namespace std::chrono_literals;
constexpr std::uint32_t kWidth = 16, kExperts = 32, kTopK = 4;

const TestLayer kLayer{.id = {std::byte{0}, std::byte{9}}, .width = kWidth, .n_expert = kExperts};

std::unique_ptr<FakeWorker> worker(std::uint32_t begin = 0, std::uint32_t end = kExperts) { return make_worker(kLayer, begin, end); }

class Table : public testing::Test, protected TestClient {
 protected:
  void start(LocalPolicy policy, Nanos connect_wait = 5s) {
    Options options;
    options.workers_follow = true;
    options.local = policy;
    options.connect_wait = connect_wait;
    options.no_replica_wait = 1s;
    TestClient::start(kLayer, std::move(options));
  }

  Status round(RoundDriver& with) {
    constexpr std::uint32_t n_rows = 6;
    draw(n_rows, kWidth);
    pick(n_rows, kTopK, 9, kExperts);
    out.assign(pairs.size() * kWidth, -1e9f);
    const Round r{.layer = layer, .rows = rows.data(), .row_stride = kWidth, .n_rows = n_rows, .pairs = pairs, .out = out.data()};
    const Status status = with.run(r, [&](const Round& what, std::span<const std::uint32_t> indices) -> Status {
      for (std::uint32_t i : indices)
        for (std::uint32_t j = 0; j < kWidth; ++j)
          what.out[i * kWidth + j] = fake_expert(rows[what.pairs[i].row * kWidth + j], what.pairs[i].expert);
      return {};
    });
    for (std::size_t i = 0; status && i < pairs.size(); ++i)
      for (std::uint32_t j = 0; j < kWidth; ++j) {
        EXPECT_EQ(out[i * kWidth + j], fake_expert(rows[pairs[i].row * kWidth + j], pairs[i].expert));
      }
    return status;
  }
  Status round() { return round(*driver); }

  std::uint64_t up() const { return dispatcher->stats().workers_up; }
  bool was_tried(const std::string& id) const {
    return std::ranges::any_of(dispatcher->workers(), [&](const WorkerView& w) { return w.id == id && w.failures > 0; });
  }
  // Of all workers of that name since the last call.
  Served served(const std::string& id) {
    for (Served& each : dispatcher->take_served()) {
      Served& sum = services[each.id];
      sum.pairs += each.pairs;
      sum.rows += each.rows;
      sum.bytes += each.bytes;
    }
    return services[id];
  }

  std::map<std::string, Served> services;
};

TEST_F(Table, TheFirstRoundWaitsForTheFirstTable) {
  const auto a = worker();
  start(LocalPolicy::kNever);
  std::jthread later([&] {
    std::this_thread::sleep_for(100ms);
    dispatcher->set_workers({at(*a, "a")});
  });
  ASSERT_TRUE(round());
  EXPECT_EQ(dispatcher->stats().pairs_local, 0u);
  EXPECT_EQ(dispatcher->stats().pairs_remote, 24u);
}

TEST_F(Table, AnEmptyTableIsComputedHere) {
  start(LocalPolicy::kFallback);
  dispatcher->set_workers({});
  ASSERT_TRUE(round());
  EXPECT_EQ(dispatcher->stats().pairs_local, 24u);
}

TEST_F(Table, ChangesFollowWhileRoundsRunAndNothingIsComputedHere) {
  // Whatever is left out and comes back, somebody always holds everything.
  const auto a = worker(), b = worker(), c = worker(0, 16), d = worker(16, 32);
  start(LocalPolicy::kNever);
  const std::vector<std::vector<WorkerAddress>> tables = {
      {at(*a, "a")}, {at(*a, "a"), at(*b, "b")}, {at(*b, "b")}, {at(*b, "b"), at(*c, "c"), at(*d, "d")},
      {at(*c, "c"), at(*d, "d")}, {at(*c, "c"), at(*d, "d"), at(*a, "a")}};
  std::atomic<bool> stop = false;
  std::jthread changer([&] {
    for (std::size_t i = 0; !stop; ++i) {
      dispatcher->set_workers(tables[i % tables.size()]);
      std::this_thread::sleep_for(3ms * (1 + i % 4));
    }
  });
  for (const auto end = monotonic_now() + 2s; monotonic_now() < end;) ASSERT_TRUE(round());
  stop = true;
  changer.join();
  EXPECT_EQ(dispatcher->stats().pairs_local, 0u);
  EXPECT_EQ(dispatcher->stats().invalid_answers, 0u);
  EXPECT_EQ(dispatcher->stats().workers_lost, 0u);
  // Everything that was answered is somebody's service, also of those who left.
  dispatcher->set_workers({at(*a, "a")});
  ASSERT_TRUE(wait_for([&] { return round() && up() == 1; }));
  (void)round();
  std::uint64_t n_pairs = 0;
  ASSERT_TRUE(wait_for([&] {
    (void)served("");
    n_pairs = 0;
    for (const auto& [id, sum] : services) n_pairs += sum.pairs;
    return n_pairs >= dispatcher->stats().pairs_remote;
  }));
  for (const char* id : {"a", "b", "c", "d"}) EXPECT_GT(services[id].pairs, 0u) << id;
  EXPECT_GT(services["a"].bytes, services["a"].rows * kWidth * sizeof(float));
}

TEST_F(Table, AWorkerThatIsRemovedFinishesItsRound) {
  const auto slow = worker();
  start(LocalPolicy::kNever);
  dispatcher->set_workers({at(*slow, "slow")});
  ASSERT_TRUE(round());
  slow->faults.delay_ns = std::chrono::nanoseconds(300ms).count();
  std::jthread later([&] {
    std::this_thread::sleep_for(50ms);
    dispatcher->set_workers({});
  });
  ASSERT_TRUE(round());  // asked before, answered after it was removed
  EXPECT_EQ(dispatcher->stats().pairs_local, 0u);
  EXPECT_TRUE(wait_for([&] { return up() == 0; }));
  EXPECT_TRUE(logged("has left"));
  ASSERT_FALSE(round());  // and nobody else is there
}

TEST_F(Table, AnotherAddressOfTheSameWorkerTakesOver) {
  auto a = worker();
  const auto b = worker();
  start(LocalPolicy::kFallback);
  dispatcher->set_workers({at(*a, "laptop")});
  ASSERT_TRUE(round());
  EXPECT_EQ(a->execs, 1u);
  a->stop();
  dispatcher->set_workers({at(*b, "laptop")});
  ASSERT_TRUE(wait_for([&] { return up() == 1; }));
  ASSERT_TRUE(wait_for([&] { return round() && b->execs > 0; }));
}

TEST_F(Table, ANewReplicaIsTriedBesideAQuickOne) {
  const auto a = worker(), b = worker();
  start(LocalPolicy::kNever);
  dispatcher->set_workers({at(*a, "a")});
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(round());
  dispatcher->set_workers({at(*a, "a"), at(*b, "b")});
  EXPECT_TRUE(wait_for([&] { return round() && b->execs > 20; }));
}

TEST_F(Table, SlotsAreUsedAgainEvenWhileADriverSleeps) {
  const auto a = worker();
  start(LocalPolicy::kFallback);
  const auto sleeper = dispatcher->make_driver();
  dispatcher->set_workers({at(*a, "a")});
  ASSERT_TRUE(round());
  ASSERT_TRUE(round(*sleeper));
  // The same worker under ever new names: more than the table has slots, in tables of a hundred.
  constexpr std::uint32_t kAtOnce = 100;
  for (std::uint32_t n = 0; n < kWorkersMax + 300; n += kAtOnce) {
    std::vector<WorkerAddress> table;
    // Ports that nobody listens on: refused at once.
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      const std::uint32_t k = n + i;
      table.push_back({"127.1." + std::to_string(k / 250) + "." + std::to_string(1 + k % 250), 1, {}, "n" + std::to_string(k)});
    }
    dispatcher->set_workers(table);
    // It has a slot, then. (Lines of the log are no proof: so many at once are cut short.)
    ASSERT_TRUE(wait_for([&] { return was_tried(table.back().id); })) << n;
  }
  dispatcher->set_workers({at(*a, "back")});
  ASSERT_TRUE(wait_for([&] { return round() && served("back").pairs > 0; }));
  ASSERT_TRUE(wait_for([&] {
    const std::uint64_t before = a->execs;
    return round(*sleeper) && a->execs > before;
  }));
}

TEST_F(Table, TooManyAndMalformedWorkersAreLeftOut) {
  const auto a = worker();
  start(LocalPolicy::kNever);
  std::vector<WorkerAddress> table = {{"127.0.0.1", a->port(), "no fingerprint", "odd"}, at(*worker(), "gone")};
  table[1].port = a->port();
  table[0].port = 1;
  for (std::uint32_t i = 0; i < kWorkersMax + 10; ++i)
    table.push_back({"127.2." + std::to_string(i / 250) + "." + std::to_string(1 + i % 250), 1, {}, {}});
  dispatcher->set_workers(table);
  ASSERT_TRUE(round());
  EXPECT_TRUE(logged("the first 1024"));
  EXPECT_TRUE(logged("cannot be used"));
}

TEST_F(Table, UsesOfExpertsAreCounted) {
  start(LocalPolicy::kFallback);
  dispatcher->set_workers({});
  ASSERT_TRUE(round());
  ASSERT_TRUE(round());
  const std::vector<LayerUses> uses = dispatcher->take_uses();
  ASSERT_EQ(uses.size(), 1u);
  EXPECT_EQ(uses[0].layer_id, kLayer.id);
  std::uint64_t sum = 0;
  for (const std::uint64_t n : uses[0].uses) sum += n;
  EXPECT_EQ(sum, 48u);
  EXPECT_EQ(uses[0].uses[0], 4u);  // rows 0 and 1, twice
  EXPECT_TRUE(dispatcher->take_uses().empty());
}

}  // namespace
}  // namespace kvasir::dispatch
