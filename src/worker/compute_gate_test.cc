#include "worker/compute_gate.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "worker/cost_model.h"
#include "worker/greeting.h"
#include "worker/memory_budget.h"
#include "worker/peer_io.h"

namespace kvasir::worker {
namespace {

TEST(ComputeGate, TurnsGoRoundInOrderAndTheLineIsBounded) {
  const Wake wake;
  ComputeGate gate(2);
  ComputeGate::Ticket a(wake.fd()), b(wake.fd()), c(wake.fd()), d(wake.fd());
  ASSERT_TRUE(gate.try_enter(a));
  EXPECT_FALSE(gate.try_enter(b));
  EXPECT_TRUE(gate.join(b));
  EXPECT_TRUE(gate.join(c));
  EXPECT_FALSE(gate.join(d)) << "two wait already";
  EXPECT_EQ(gate.waiting(), 2u);
  EXPECT_FALSE(gate.has_turn(b));
  gate.withdraw(a);
  EXPECT_TRUE(gate.has_turn(b));
  EXPECT_FALSE(gate.try_enter(a)) << "the turn was handed on, not dropped";
  gate.withdraw(c);  // cancelled while waiting
  gate.withdraw(b);
  gate.withdraw(b);  // any number of times
  EXPECT_TRUE(gate.try_enter(d));
  EXPECT_EQ(gate.waiting(), 0u);
  gate.withdraw(d);
}

TEST(ComputeGate, TheLineIsBoundedByExpectedTime) {
  using std::chrono::hours;
  const Wake wake;
  ComputeGate gate(8, hours(3));
  ComputeGate::Ticket a(wake.fd()), b(wake.fd()), c(wake.fd()), d(wake.fd()), e(wake.fd());
  ASSERT_TRUE(gate.try_enter(a));
  gate.expect(a, hours(9));
  EXPECT_TRUE(gate.join(b, hours(2))) << "one may wait whatever runs";
  EXPECT_FALSE(gate.join(c, hours(1))) << "what runs counts, too";
  EXPECT_EQ(gate.waiting_time(), hours(2));
  gate.withdraw(a);
  EXPECT_EQ(gate.waiting_time(), hours(0)) << "b runs";
  EXPECT_TRUE(gate.join(a, hours(1)));
  EXPECT_TRUE(gate.join(c, hours(4))) << "what counts is the time before it: 2 + 1";
  EXPECT_FALSE(gate.join(d));
  gate.withdraw(c);
  EXPECT_TRUE(gate.join(d)) << "not known: by number alone";
  EXPECT_TRUE(gate.join(e, hours(1)));
  EXPECT_EQ(gate.waiting_time(), hours(2));
  for (ComputeGate::Ticket* ticket : {&a, &b, &d, &e}) gate.withdraw(*ticket);
  EXPECT_EQ(gate.waiting_time(), hours(0));
}

TEST(ComputeGate, WhatIsTakenAlongWaitsNoMore) {
  using std::chrono::hours;
  struct Work final : ComputeGate::Work {};
  const Wake wake;
  ComputeGate gate(8, hours(3));
  ComputeGate::Ticket a(wake.fd()), b(wake.fd()), c(wake.fd()), d(wake.fd());
  ASSERT_TRUE(gate.try_enter(a));
  EXPECT_TRUE(gate.join(b, hours(4), std::make_shared<Work>()));
  EXPECT_FALSE(gate.join(c, hours(1)));
  const auto taken = gate.take_along([](const ComputeGate::Work&) { return true; });
  ASSERT_EQ(taken.size(), 1u);
  EXPECT_EQ(gate.waiting_time(), hours(0));
  EXPECT_TRUE(gate.join(c, hours(1)));
  EXPECT_TRUE(gate.join(d, hours(1))) << "what was taken along is part of what runs";
  gate.deliver(*taken[0]);
  EXPECT_TRUE(gate.delivered(b));
  for (ComputeGate::Ticket* ticket : {&b, &a, &c, &d}) gate.withdraw(*ticket);
  EXPECT_EQ(gate.waiting_time(), hours(0));
}

TEST(CostModel, StartsFromTheTunersFiguresAndFollowsRequests) {
  using namespace std::chrono_literals;
  using wire::Numerics;
  CostModel costs;
  EXPECT_EQ(costs.predict(Numerics::kExact, 8, 8), 0ns);
  EXPECT_EQ(costs.pair_us(), 0u);
  ffn::Speeds exact{}, fast{};
  exact[0] = 1000;  // 1 ms a pair with one row an expert
  exact[3] = 4000;  // with eight
  fast[0] = 2000;
  costs.seed(exact, fast);
  EXPECT_EQ(costs.pair_us(), 1000u);
  EXPECT_EQ(costs.predict(Numerics::kExact, 8, 8), 8ms);
  EXPECT_EQ(costs.predict(Numerics::kExact, 64, 8), 16ms);
  EXPECT_EQ(costs.predict(Numerics::kExact, 16, 8), 4ms) << "the next class that is known";
  EXPECT_EQ(costs.predict(Numerics::kExact, 8192, 8), 2048ms) << "the last that is";
  EXPECT_EQ(costs.predict(Numerics::kFast, 8, 8), 4ms);
  EXPECT_EQ(costs.predict(Numerics::kInvariant, 8, 8), 8ms) << "as exact until it is seen";
  for (int i = 0; i < 100; ++i) costs.observe(Numerics::kInvariant, 8, 8, 24ms);
  EXPECT_EQ(costs.predict(Numerics::kInvariant, 8, 8), 24ms);
  EXPECT_EQ(costs.predict(Numerics::kExact, 8, 8), 8ms);
  EXPECT_EQ(costs.pair_us(), 3000u) << "of the class asked for last";
  // Prompts do not change what is said of decoding.
  for (int i = 0; i < 100; ++i) costs.observe(Numerics::kExact, 4096, 64, 4096 * 100us);
  EXPECT_EQ(costs.pair_us(), 1000u);
  EXPECT_NEAR(static_cast<double>(costs.predict(Numerics::kExact, 4096, 64).count()), 4096e5, 1e6);
}

TEST(ComputeGate, HoldsOneAtATimeAndWakesTheNext) {
  ComputeGate gate(64);
  int inside = 0, done = 0;  // guarded by the gate: a race here fails under the thread sanitizer
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      const Wake wake;
      for (int i = 0; i < 200; ++i) {
        ComputeGate::Ticket ticket(wake.fd());
        const ComputeGate::Guard guard(gate, ticket);
        ASSERT_TRUE(gate.join(ticket));
        while (!gate.has_turn(ticket))
          wait_for(nullptr, false, &wake, monotonic_now() + std::chrono::seconds(10));
        EXPECT_EQ(++inside, 1);
        ++done;
        --inside;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(done, 1600);
  EXPECT_GT(gate.held(monotonic_now()).count(), 0);
}

TEST(MemoryBudget, RefusesPastItsLimitAndTakesBack) {
  MemoryBudget budget(100);
  MemoryBudget::Share first = budget.take(60);
  EXPECT_TRUE(first);
  EXPECT_FALSE(budget.take(41));
  MemoryBudget::Share moved = std::move(first);
  EXPECT_TRUE(budget.take(40));  // given back at once
  moved = {};
  EXPECT_TRUE(budget.take(100));
}

TEST(Greeting, TheTokenIsComparedWhole) {
  EXPECT_TRUE(equal_in_constant_time("secret", "secret"));
  EXPECT_FALSE(equal_in_constant_time("secret", "secres"));
  EXPECT_FALSE(equal_in_constant_time("secret", "secret2"));
  EXPECT_FALSE(equal_in_constant_time("secret", ""));
}

TEST(Greeting, NamesTheFieldThatDiffers) {
  wire::NumericsId ours{.ggml_version = "0.27.0", .cpu_variant = "AVX2=1", .probe = {}};
  wire::Hello peer;
  peer.numerics_id = ours;
  EXPECT_FALSE(refuse_hello(peer, ours, ""));
  peer.numerics_id.probe[3] = std::byte{1};
  EXPECT_NE(refuse_hello(peer, ours, "")->message.find("probe"), std::string::npos);
  peer.numerics_id.cpu_variant = "NEON=1";
  EXPECT_NE(refuse_hello(peer, ours, "")->message.find("NEON=1"), std::string::npos);
  peer.numerics_id.ggml_version = "0.26.0";
  const auto refusal = refuse_hello(peer, ours, "");
  EXPECT_EQ(refusal->code, wire::ErrorCode::kNumerics);
  EXPECT_NE(refusal->message.find("0.26.0"), std::string::npos);
  peer.numerics = wire::Numerics::kFast;
  EXPECT_FALSE(refuse_hello(peer, ours, ""));
  // A stranger learns nothing but that a token is wanted.
  EXPECT_EQ(refuse_hello(peer, ours, "t")->code, wire::ErrorCode::kUnauthorized);
}

}  // namespace
}  // namespace kvasir::worker
