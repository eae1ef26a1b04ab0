#include "worker/compute_gate.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

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
