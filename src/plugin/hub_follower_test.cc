// The follower between a real hub over a socket and a dispatcher with fake workers.
#include "plugin/hub_follower.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "dispatch/client/fake_worker.h"
#include "gguf/moe_model.h"
#include "hub/http/test_hub.h"

namespace kvasir::plugin {
namespace {

using namespace std::chrono_literals;
using hub::TestHub;
using nlohmann::json;
using ::testing::HasSubstr;

constexpr std::uint32_t kWidth = 16, kExperts = 8;

TestHub::Options closed_group() {
  TestHub::Options options;
  options.no_proof = true;
  options.server.wait_max = 500ms;
  return options;
}

class Follower : public testing::Test {
 protected:
  Follower() : server(std::make_unique<TestHub>(closed_group())) {
    const auto model = *gguf::MoeModel::open((server->top / "models" / "m.gguf").string());
    layer_id = *model.layer_id(model.layers()[0]);
  }
  ~Follower() override { follower.reset(); }

  std::unique_ptr<dispatch::FakeWorker> worker() {
    ExpertSet all;
    all.add({0, kExperts});
    return std::make_unique<dispatch::FakeWorker>(layer_id, all, kWidth);
  }
  // What a node says of itself.
  void announce(const std::string& id, const std::string& url, bool draining = false) {
    hub::TestClient client = server->client();
    const json beat = {{"worker_id", id}, {"model", "m"}, {"segments", {{0, 0, 8}}}, {"url", url}, {"ticket", "t"}, {"draining", draining}};
    EXPECT_EQ(client.post("/api/expert-coverage", server->worker, beat).status, 200);
  }
  void announce(const std::string& id, const dispatch::FakeWorker& worker, bool draining = false) {
    announce(id, std::format("127.0.0.1:{}", worker.port()), draining);
  }

  void start(dispatch::LocalPolicy policy = dispatch::LocalPolicy::kNever) {
    const auto log = [this](std::string line) {
      const std::lock_guard lock(mutex);
      lines.push_back(std::move(line));
    };
    dispatch::Options options;
    options.workers_follow = true;
    options.local = policy;
    options.no_replica_wait = 1s;
    options.log = log;
    dispatcher = *dispatch::Dispatcher::create(std::move(options));
    HubFollower::Options follow{.hub = {std::format("http://127.0.0.1:{}", server->server->port()), server->backbone, ""}, .log = log};
    follow.report_interval = 100ms;
    follower = *HubFollower::start(std::move(follow), *dispatcher);
    follower->add_layer(layer_id);
    wire::Recipe recipe;
    recipe.n_embd = kWidth;
    recipe.n_ff = 8;
    recipe.n_expert = kExperts;
    layer = &dispatcher->register_layer(layer_id, 0, recipe);
    driver = dispatcher->make_driver();
  }
  Status round() {
    std::vector<float> rows(2 * kWidth, 0.25f), out(4 * kWidth);
    const std::vector<wire::Pair> pairs = {{0, 0}, {0, 3}, {1, 0}, {1, 5}};
    const dispatch::Round r{.layer = layer, .rows = rows.data(), .row_stride = kWidth, .n_rows = 2, .pairs = pairs, .out = out.data()};
    const Status status = driver->run(r, [&](const dispatch::Round& what, std::span<const std::uint32_t> indices) -> Status {
      for (std::uint32_t i : indices)
        std::ranges::fill_n(what.out + i * kWidth, kWidth, dispatch::fake_expert(0.25f, what.pairs[i].expert));
      return {};
    });
    for (std::size_t i = 0; status && i < pairs.size(); ++i) EXPECT_EQ(out[i * kWidth], dispatch::fake_expert(0.25f, pairs[i].expert));
    return status;
  }
  bool logged(std::string_view text) {
    const std::lock_guard lock(mutex);
    return std::ranges::any_of(lines, [&](const std::string& line) { return line.contains(text); });
  }
  template <typename Done>
  static bool wait_for(Done&& done, Nanos limit = 30s) {
    for (const auto begin = monotonic_now(); monotonic_now() - begin < limit; std::this_thread::sleep_for(5ms))
      if (done()) return true;
    return false;
  }
  std::int64_t pairs_in_ledger(const std::string& id) const {
    std::int64_t sum = 0;
    hub::TestClient client = server->client();
    const json all = client.get("/api/contributions", server->admin).json();
    for (const json& entry : all["entries"])
      if (entry["worker_id"] == id) sum += entry["pairs"].get<std::int64_t>();
    return sum;
  }

  std::unique_ptr<TestHub> server;
  wire::LayerId layer_id{};
  std::mutex mutex;
  std::vector<std::string> lines;
  std::unique_ptr<dispatch::Dispatcher> dispatcher;
  std::unique_ptr<dispatch::RoundDriver> driver;
  std::unique_ptr<HubFollower> follower;
  const dispatch::Layer* layer = nullptr;
  bool flip = false;
};

TEST_F(Follower, FollowsTheTableAndReportsWhatWasDone) {
  const auto a = worker(), b = worker();
  announce("a", *a);
  start();
  ASSERT_TRUE(round());
  EXPECT_EQ(dispatcher->stats().pairs_remote, 4u);
  announce("b", *b);
  ASSERT_TRUE(wait_for([&] { return round() && b->execs > 0; }));
  // One drains: everything is asked of the other.
  announce("a", *a, /*draining=*/true);
  ASSERT_TRUE(wait_for([&] { return dispatcher->stats().workers_up == 1; }));
  const std::uint64_t before = a->execs;
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(round());
  EXPECT_EQ(a->execs, before);
  EXPECT_EQ(dispatcher->stats().pairs_local, 0u);
  // At the end the ledger has it all, without waiting for the next report.
  const auto done = static_cast<std::int64_t>(dispatcher->stats().pairs_remote);
  follower.reset();
  // A hedge may have been answered twice.
  EXPECT_GE(pairs_in_ledger("a") + pairs_in_ledger("b"), done);
}

// The backbone went on connecting to workers of the new file, and being refused, for ever.
TEST_F(Follower, SaysOnceThatTheModelWasReplaced) {
  const auto a = worker();
  announce("a", *a);
  start(dispatch::LocalPolicy::kFallback);
  ASSERT_TRUE(wait_for([&] { return round() && dispatcher->stats().workers_up == 1; }));
  server->write_model("m", 2);
  server->hub->catalogue().rescan_soon();
  const auto b = worker();
  // Nodes of the new file come, until the follower has seen it.
  ASSERT_TRUE(wait_for([&] {
    announce("b", *b, /*draining=*/std::exchange(flip, !flip));
    std::this_thread::sleep_for(50ms);
    return logged("has replaced 'm'");
  }));
  ASSERT_TRUE(wait_for([&] { return dispatcher->stats().workers_up == 0; }));
  ASSERT_TRUE(round());  // computed here
  announce("c", *b);
  std::this_thread::sleep_for(1s);
  EXPECT_EQ(dispatcher->stats().workers_up, 0u);
  const std::lock_guard lock(mutex);
  EXPECT_EQ(std::ranges::count_if(lines, [](const std::string& line) { return line.contains("has replaced 'm'"); }), 1);
  EXPECT_FALSE(std::ranges::any_of(lines, [](const std::string& line) { return line.contains("has no model"); }));
}

TEST_F(Follower, HeatRaisesTheTargetOfWhatIsUsed) {
  const auto a = worker();
  announce("a", *a);
  start();
  for (int i = 0; i < 600; ++i) ASSERT_TRUE(round());
  follower.reset();
  const auto runs = server->hub->with_market([](hub::Market& market) {
    market.advance(monotonic_now() + 31s);
    return market.demand("m", monotonic_now() + 31s);
  });
  const auto target = [&](std::uint32_t expert) {
    for (const hub::Run& run : runs)
      if (run.layer == 0 && run.begin <= expert && expert < run.end) return run.target;
    return 0u;
  };
  EXPECT_GT(target(0), target(1));  // two of four uses; none
}

TEST_F(Follower, TellsTheHubHowFastItGoes) {
  const auto a = worker();
  announce("a", *a);
  start();
  const auto seen = [&](auto&& what) {
    return server->hub->with_traffic("m", [&](hub::Traffic& traffic) { return what(traffic); });
  };
  const auto rounds_done = [](hub::Traffic& t) { return t.totals()[static_cast<std::size_t>(hub::Counter::kRounds)]; };
  ASSERT_TRUE(wait_for([&] {
    EXPECT_TRUE(round());
    return seen([](hub::Traffic& traffic) { return traffic.rates(monotonic_now()).rounds > 0; });
  }));
  seen([&](hub::Traffic& traffic) {
    EXPECT_EQ(traffic.backbones(monotonic_now()), 1u);
    EXPECT_GT(traffic.rates(monotonic_now()).bytes_sent, 0);
    EXPECT_EQ(traffic.rates(monotonic_now()).local_share(), 0);
    EXPECT_GT(traffic.latency_us("a").value_or(0), 0);
    EXPECT_EQ(traffic.layers().size(), 1u);
    EXPECT_GT(traffic.layers()[0].mean_us, 0);
    return true;
  });
  // Nothing more is done: the speed goes, the sum stays, and a last report is not lost.
  const auto stands_still = [](hub::Traffic& traffic) { return traffic.rates(monotonic_now()).rounds == 0; };
  EXPECT_TRUE(wait_for([&] { return seen(stands_still); }));
  EXPECT_EQ(seen(rounds_done), dispatcher->stats().rounds);
}

TEST_F(Follower, SaysWhenAWorkerDoesNotAnswer) {
  auto a = worker();
  announce("a", *a);
  start();
  ASSERT_TRUE(round());
  const auto silent = [&] {
    return server->hub->with_traffic("m", [](hub::Traffic& t) { return t.is_silent("a", monotonic_now()); });
  };
  EXPECT_FALSE(silent());
  a.reset();
  EXPECT_TRUE(wait_for(silent));
}

TEST_F(Follower, KeepsItsTableWhileTheHubIsAway) {
  const auto a = worker();
  announce("a", *a);
  start();
  ASSERT_TRUE(round());
  server->server.reset();
  ASSERT_TRUE(wait_for([&] { return logged("used meanwhile"); }));
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(round());
  EXPECT_EQ(dispatcher->stats().pairs_local, 0u);
}

TEST_F(Follower, AModelThatTheHubDoesNotHaveIsSaid) {
  layer_id[0] ^= std::byte{1};
  start(dispatch::LocalPolicy::kFallback);
  ASSERT_TRUE(round());
  EXPECT_EQ(dispatcher->stats().pairs_local, 4u);
  EXPECT_TRUE(logged("the hub has no model with these experts"));
}

TEST_F(Follower, AWrongTokenIsSaidAndRoundsAreComputedHere) {
  server->backbone = "kvasir_wrong";
  start(dispatch::LocalPolicy::kFallback);
  EXPECT_TRUE(wait_for([&] { return logged("not known here"); }));
}

TEST(AddressOf, TakesOnlyWhatIsSafe) {
  const json good = {{"worker_id", "w"}, {"url", "192.0.2.7:7000"}, {"fingerprint", std::string(64, 'a')}, {"ticket", "t"}};
  const auto address = address_of(good);
  ASSERT_TRUE(address) << address.error().message;
  EXPECT_EQ(address->host, "192.0.2.7");
  EXPECT_EQ(address->id, "w");
  EXPECT_EQ(address->token, "t");
  const auto error = [&](const char* name, const json& value) {
    json worker = good;
    worker[name] = value;
    const auto got = address_of(worker);
    return got ? std::string() : got.error().message;
  };
  EXPECT_THAT(error("fingerprint", ""), HasSubstr("no certificate"));
  EXPECT_EQ(error("url", "127.0.0.1:7000"), "");
  json relayed = good;
  relayed["url"] = "192.0.2.7:7000+relay:abc";
  EXPECT_EQ(address_of(relayed)->relay, "abc");
  EXPECT_EQ(error("url", "relay:abc"), "");
  EXPECT_NE(error("url", "192.0.2.7:0"), "");
  EXPECT_NE(error("url", 7), "");
  EXPECT_NE(error("fingerprint", "zz"), "");
  EXPECT_FALSE(address_of(json::array()));
}

}  // namespace
}  // namespace kvasir::plugin
