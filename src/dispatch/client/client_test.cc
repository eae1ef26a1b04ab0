// The client over loopback against workers that misbehave in every way we could think of.
// Each test also checks every output value.
#include <gtest/gtest.h>

#include <cmath>

#include "base/log_limit.h"
#include "dispatch/client/test_client.h"

namespace kvasir::dispatch {
namespace {

using namespace std::chrono_literals;
constexpr std::uint32_t kWidth = 32;
constexpr std::uint32_t kExperts = 64;

const TestLayer kLayer{.id = {std::byte{0}, std::byte{0}, std::byte{0}, std::byte{7}}, .width = kWidth, .n_expert = kExperts};

std::unique_ptr<FakeWorker> worker(std::uint32_t begin, std::uint32_t end, const net::TlsIdentity* tls = nullptr) {
  return make_worker(kLayer, begin, end, tls);
}

struct Client : TestClient {
  explicit Client(std::vector<WorkerAddress> workers, LocalPolicy policy = LocalPolicy::kFallback,
                  std::function<void(Options&)> change = {}) {
    Options options;
    options.workers = std::move(workers);
    options.local = policy;
    options.connect_wait = 3s;
    options.no_replica_wait = 400ms;
    options.spot_check = 0;  // lying_worker_test.cc has them
    if (change) change(options);
    start(kLayer, std::move(options));
  }

  // `n_rows` rows through `top_k` experts each; checks every output.
  Status round(std::uint32_t n_rows, std::uint32_t top_k, std::size_t stride = kWidth) {
    draw(n_rows, stride, scale);
    pick(n_rows, top_k, 11, kExperts);
    out.assign(pairs.size() * kWidth, -1e9f);
    const Round r{.layer = layer, .rows = rows.data(), .row_stride = stride, .n_rows = n_rows, .pairs = pairs, .out = out.data()};
    const auto begun = monotonic_now();
    Status status = driver->run(r, [&](const Round& what, std::span<const std::uint32_t> indices) -> Status {
      for (std::uint32_t i : indices)
        for (std::uint32_t j = 0; j < kWidth; ++j)
          what.out[i * kWidth + j] = expected(what.pairs[i], j, stride);
      return {};
    });
    took = monotonic_now() - begun;
    if (status)
      for (std::size_t i = 0; i < pairs.size(); ++i)
        for (std::uint32_t j = 0; j < kWidth; ++j)
          if (const float want = expected(pairs[i], j, stride); !(std::abs(out[i * kWidth + j] - want) <= tolerance * std::abs(want) + tolerance)) {
            ADD_FAILURE() << "pair " << i << " value " << j << ": " << out[i * kWidth + j] << " instead of " << want;
            return status;
          }
    return status;
  }
  float expected(wire::Pair pair, std::uint32_t j, std::size_t stride) const {
    return fake_expert(rows[pair.row * stride + j], pair.expert);
  }

  float scale = 1, tolerance = 0;
  Nanos took{};
};

// Many workers can make a backbone say something at once.
TEST(Client, LinesAboutWorkersAreLimited) {
  std::vector<WorkerAddress> nobody;
  for (std::uint16_t port = 1; port <= 3 * kLogLinesAtOnce; ++port) nobody.push_back({"127.0.0.1", port, {}});
  const TimePoint begun = monotonic_now();
  Client client(nobody);
  ASSERT_TRUE(client.round(3, 8));  // all have been tried by then
  EXPECT_TRUE(client.wait_for([&] {
    const std::lock_guard lock(client.mutex);
    return client.lines.size() >= kLogLinesAtOnce;
  }, 20s));
  const std::lock_guard lock(client.mutex);
  EXPECT_LE(client.lines.size(), kLogLinesAtOnce + static_cast<std::size_t>((monotonic_now() - begun) / kLogLineEvery) + 1);
}

TEST(ParseWorkers, ReadsLinksAndSaysWhatIsWrong) {
  const std::string print(64, 'a');
  const auto workers = parse_workers("127.0.0.1:9000, host.local:81#" + print + ",[::1]:5,");
  ASSERT_TRUE(workers);
  ASSERT_EQ(workers->size(), 3u);
  EXPECT_EQ((*workers)[1].host, "host.local");
  EXPECT_EQ((*workers)[1].fingerprint, print);
  EXPECT_EQ((*workers)[2].host, "::1");
  EXPECT_FALSE(parse_workers("host"));
  EXPECT_FALSE(parse_workers("host:0"));
  EXPECT_FALSE(parse_workers("host:9#abc"));
  const auto relayed = parse_workers("relay:laptop-1a2b#" + print + ",10.0.0.1:7070+relay:desk#" + print);
  ASSERT_TRUE(relayed);
  EXPECT_EQ((*relayed)[0].host, "");
  EXPECT_EQ((*relayed)[0].relay, "laptop-1a2b");
  EXPECT_EQ((*relayed)[0].fingerprint, print);
  EXPECT_EQ((*relayed)[1].host, "10.0.0.1");
  EXPECT_EQ((*relayed)[1].port, 7070);
  EXPECT_EQ((*relayed)[1].relay, "desk");
  for (const char* wrong : {"relay:", "host:9+", "host:9+desk", "host:9+relay:", "+relay:desk"})
    EXPECT_FALSE(parse_workers(wrong)) << wrong;
  EXPECT_TRUE(parse_workers("")->empty());
}

TEST(Client, ComputesEverythingRemotelyOverTwoWorkers) {
  auto a = worker(0, 32), b = worker(32, 64);
  Client client({at(*a), at(*b)});
  for (std::uint32_t n_rows : {1u, 2u, 7u, 64u}) ASSERT_TRUE(client.round(n_rows, 8));
  ASSERT_TRUE(client.round(16, 8, kWidth + 5));  // rows that do not lie densely
  const Stats stats = client.stats();
  EXPECT_EQ(stats.pairs_local, 0u);
  EXPECT_EQ(stats.pairs_remote, (1u + 2 + 7 + 64 + 16) * 8);
  EXPECT_EQ(stats.rounds, 5u);
  EXPECT_EQ(stats.workers_up, 2u);
  EXPECT_EQ(a->execs, 5u);
  EXPECT_GT(stats.bytes_sent, 0u);
  EXPECT_GT(stats.bytes_received, stats.bytes_sent);
}

TEST(Client, AnswersInManyFrames) {
  auto a = worker(0, 64);
  a->faults.rows_per_frame = 3;
  Client client({at(*a)});
  ASSERT_TRUE(client.round(33, 4));
  EXPECT_EQ(client.stats().pairs_local, 0u);
}

TEST(Client, NarrowRowsWithFastNumericsAndOverflowWithoutBlame) {
  auto a = worker(0, 64);
  const auto fast = [](Options& o) {
    o.numerics = wire::Numerics::kFast;
    o.row_type = o.result_type = wire::RowType::kF16;
  };
  Client client({at(*a)}, LocalPolicy::kFallback, fast);
  client.tolerance = 0.01f;
  for (std::uint32_t n_rows : {1u, 9u}) ASSERT_TRUE(client.round(n_rows, 8));
  EXPECT_EQ(client.stats().pairs_local, 0u);
  EXPECT_LT(client.stats().bytes_received, (1 + 9) * 8 * kWidth * 3);
  // 4000 x 63 passes f16's range: computed here, and the worker keeps its good name.
  client.scale = 4000;
  ASSERT_TRUE(client.round(8, 8));
  EXPECT_GT(client.stats().pairs_local, 0u);
  EXPECT_GT(client.stats().pairs_remote, 80u);
  EXPECT_EQ(client.stats().invalid_answers, 0u);
  // Exact numerics refuse to be narrowed.
  Options options;
  options.result_type = wire::RowType::kF16;
  EXPECT_FALSE(Dispatcher::create(std::move(options)));
}

TEST(Client, AWorkerNamedTwiceIsOne) {
  auto a = worker(0, 64);
  Client client({at(*a), at(*a)});
  ASSERT_TRUE(client.round(3, 8));
  EXPECT_EQ(client.stats().workers_up, 1u);
}

TEST(Client, TlsWithThePinnedCertificate) {
  const auto identity = net::make_tls_identity();
  ASSERT_TRUE(identity);
  auto a = worker(0, 64, &*identity);
  Client client({{"127.0.0.1", a->port(), net::format_fingerprint(identity->fingerprint)}});
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(client.round(5, 8));
  EXPECT_EQ(client.stats().pairs_local, 0u);
  // Another certificate is not talked to.
  Client other({{"127.0.0.1", a->port(), std::string(64, '0')}});
  ASSERT_TRUE(other.round(5, 8));
  EXPECT_EQ(other.stats().pairs_remote, 0u);
}

TEST(Client, UnreachableWorkerCostsASecondOnceAndIsComputedHere) {
  auto a = worker(0, 64);
  const WorkerAddress gone = at(*a);
  a->stop();
  Client client({gone});
  ASSERT_TRUE(client.round(4, 8));
  EXPECT_LT(client.took, 2900ms);
  EXPECT_EQ(client.stats().pairs_local, 32u);
  ASSERT_TRUE(client.round(4, 8));
  EXPECT_LT(client.took, 300ms);
  EXPECT_TRUE(client.logged("cannot be reached"));
}

TEST(Client, KilledWorkerIsReplacedAtOnceAndUsedAgainWhenItIsBack) {
  auto a = worker(0, 64);
  Client client({at(*a)});
  ASSERT_TRUE(client.round(4, 8));
  a->stop();
  ASSERT_TRUE(client.round(4, 8));
  EXPECT_LT(client.took, 500ms);
  EXPECT_GT(client.stats().pairs_local, 0u);
  a->restart();
  ASSERT_TRUE(client.wait_for([&] {
    const auto before = client.stats().pairs_remote;
    return client.round(1, 8) && client.stats().pairs_remote == before + 8;
  }));
  EXPECT_EQ(client.stats().reconnects, 1u);
  EXPECT_EQ(client.stats().workers_lost, 1u);
}

TEST(Client, KilledInMidRoundWithAReplicaNothingIsLocal) {
  auto a = worker(0, 64), b = worker(0, 64);
  Client client({at(*a), at(*b)});
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(client.round(4, 8));
  a->faults.close_mid_frame = 1000;
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(client.round(4, 8));
  EXPECT_EQ(client.stats().pairs_local, 0u);
}

TEST(Client, SwallowedRequestIsHedgedAndNoLaterRoundPays) {
  auto a = worker(0, 64), b = worker(0, 64);
  a->faults.delay_ns = b->faults.delay_ns = 2'000'000;
  Client client({at(*a), at(*b)});
  for (int i = 0; i < 40; ++i) ASSERT_TRUE(client.round(2, 8));
  a->faults.swallow = true;
  // Which of the two is asked is the dispatcher's choice, by what it measured.
  const std::uint64_t before = a->execs;
  ASSERT_TRUE(client.wait_for([&] { return client.round(2, 8) && a->execs > before; }));
  EXPECT_GE(client.stats().hedges, 1u);
  EXPECT_EQ(client.stats().pairs_local, 0u);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(client.round(2, 8));
  EXPECT_EQ(client.stats().pairs_local, 0u);
  EXPECT_LE(a->execs, before + 2);  // no later round pays, but for one that tries its new connection
}

TEST(Client, FrozenSingleWorkerIsPaidForOnceThenLocal) {
  auto a = worker(0, 64);
  Client client({at(*a)}, LocalPolicy::kFallback, [](Options& o) { o.fallback_floor = 400ms; });
  for (int i = 0; i < 40; ++i) ASSERT_TRUE(client.round(2, 8));
  a->faults.frozen = true;
  ASSERT_TRUE(client.round(2, 8));
  EXPECT_LT(client.took, 3s);
  ASSERT_TRUE(client.round(2, 8));
  EXPECT_LT(client.took, 300ms);
  EXPECT_EQ(client.stats().pairs_local, 32u);
  // Pings find out that it is not only slow; thawed it is used again.
  ASSERT_TRUE(client.wait_for([&] { return client.logged("does not answer, though the connection is open"); }));
  a->faults.frozen = false;
  ASSERT_TRUE(client.wait_for([&] {
    const auto before = client.stats().pairs_remote;
    return client.round(1, 8) && client.stats().pairs_remote == before + 8;
  }));
}

TEST(Client, DamagedAnswersQuarantineAndAreRecomputed) {
  using Fault = std::atomic<int> FakeWorker::Faults::*;
  for (const Fault fault : {&FakeWorker::Faults::bad_checksum, &FakeWorker::Faults::wrong_count, &FakeWorker::Faults::nan}) {
    auto a = worker(0, 64);
    Client client({at(*a)});
    ASSERT_TRUE(client.round(3, 8));
    a->faults.*fault = 1;
    ASSERT_TRUE(client.round(3, 8));
    EXPECT_EQ(client.stats().invalid_answers, 1u);
    EXPECT_GE(client.stats().pairs_local, 1u);
    EXPECT_TRUE(client.logged("answered wrongly"));
    const auto remote = client.stats().pairs_remote;
    ASSERT_TRUE(client.round(3, 8));
    EXPECT_EQ(client.stats().pairs_remote, remote);  // quarantined
  }
}

TEST(Client, DoubleAndBusyAnswers) {
  auto a = worker(0, 64);
  Client client({at(*a)});
  ASSERT_TRUE(client.round(3, 8));
  a->faults.twice = 1;
  ASSERT_TRUE(client.round(3, 8));
  ASSERT_TRUE(client.round(3, 8));
  EXPECT_EQ(client.stats().late_answers, 1u);
  EXPECT_EQ(client.stats().pairs_local, 0u);
  a->faults.busy = 1;
  ASSERT_TRUE(client.round(3, 8));
  EXPECT_EQ(client.stats().pairs_local, 24u);
  ASSERT_TRUE(client.round(3, 8));
  EXPECT_EQ(client.stats().pairs_local, 24u);
}

TEST(Client, NeverFailsNamingLayerAndExpertsAndRecovers) {
  auto a = worker(0, 64);
  Client client({at(*a)}, LocalPolicy::kNever);
  ASSERT_TRUE(client.round(3, 8));
  a->stop();
  const Status status = client.round(1, 2);
  ASSERT_FALSE(status);
  EXPECT_NE(status.error().message.find("layer 5"), std::string::npos);
  EXPECT_NE(status.error().message.find("experts 0,11"), std::string::npos) << status.error().message;
  EXPECT_GE(client.took, 400ms);
  a->restart();
  ASSERT_TRUE(client.wait_for([&] { return client.round(3, 8).has_value(); }));
  EXPECT_EQ(client.stats().pairs_local, 0u);
}

TEST(Client, NeverWaitsForAWorkerThatComesBackInTime) {
  auto a = worker(0, 64);
  Client client({at(*a)}, LocalPolicy::kNever, [](Options& o) { o.no_replica_wait = 8s; });
  ASSERT_TRUE(client.round(3, 8));
  a->stop();
  std::thread later([&] {
    std::this_thread::sleep_for(200ms);
    a->restart();
  });
  EXPECT_TRUE(client.round(3, 8));
  later.join();
}

TEST(Client, RefusedHelloIsLoggedOnceWithTheWorkersSentence) {
  auto a = worker(0, 64);
  a->faults.refuse_hello = true;
  Client client({at(*a)});
  ASSERT_TRUE(client.round(3, 8));
  EXPECT_LT(client.took, 1s);  // an answer, so no waiting for it
  EXPECT_TRUE(client.logged("this worker computes otherwise"));
  EXPECT_EQ(client.stats().pairs_remote, 0u);
}

TEST(Client, DrainingWorkerGetsNothingNew) {
  auto a = worker(0, 64);
  Client client({at(*a)});
  ASSERT_TRUE(client.round(3, 8));
  a->drain();
  ASSERT_TRUE(client.wait_for([&] { return client.logged("shutting down"); }));
  const auto before = a->execs.load();
  ASSERT_TRUE(client.round(3, 8));
  EXPECT_EQ(a->execs, before);
}

TEST(Client, OnlyContactsNobody) {
  auto a = worker(0, 64);
  Client client({at(*a)}, LocalPolicy::kOnly);
  ASSERT_TRUE(client.round(3, 8));
  EXPECT_EQ(a->connections, 0u);
  EXPECT_EQ(client.stats().pairs_local, 24u);
}

TEST(Client, LocalErrorFailsTheRound) {
  auto a = worker(0, 1);
  Client client({at(*a)});
  const std::vector<float> rows(kWidth, 1);
  const std::vector<wire::Pair> pairs = {{0, 0}, {0, 9}};
  std::vector<float> out(2 * kWidth);
  const Round round{.layer = client.layer, .rows = rows.data(), .row_stride = kWidth, .n_rows = 1, .pairs = pairs, .out = out.data()};
  const Status status = client.driver->run(round, [](const Round&, std::span<const std::uint32_t>) -> Status { return fatal("no."); });
  EXPECT_FALSE(status);
  EXPECT_TRUE(client.round(3, 8));
}

TEST(Client, TwoDriversOnTwoThreads) {
  auto a = worker(0, 40), b = worker(24, 64);
  Client client({at(*a), at(*b)});
  auto second = client.dispatcher->make_driver();
  std::thread other([&] {
    const std::vector<float> rows(kWidth, 0.25f);
    for (std::uint32_t i = 0; i < 200; ++i) {
      const std::vector<wire::Pair> pairs = {{0, i % kExperts}, {0, (i + 30) % kExperts}};
      std::vector<float> out(2 * kWidth);
      const Round round{.layer = client.layer, .rows = rows.data(), .row_stride = kWidth, .n_rows = 1, .pairs = pairs, .out = out.data()};
      EXPECT_TRUE(second->run(round, [](const Round&, std::span<const std::uint32_t>) -> Status { return fatal("not expected"); }));
      EXPECT_EQ(out[0], fake_expert(0.25f, pairs[0].expert));
    }
  });
  for (int i = 0; i < 200; ++i) EXPECT_TRUE(client.round(2, 8));
  other.join();
  EXPECT_EQ(client.stats().pairs_local, 0u);
}

TEST(Client, AWorkerOfAnotherModelIsMentioned) {
  wire::LayerId other{};
  FakeWorker a(other, ExpertSet::all(kExperts), kWidth);
  Client client({at(a)});
  ASSERT_TRUE(client.round(3, 8));
  EXPECT_EQ(client.stats().pairs_local, 24u);
  EXPECT_TRUE(client.wait_for([&] { return client.logged("holds no experts of this model"); }));
}

}  // namespace
}  // namespace kvasir::dispatch
