#include <gtest/gtest.h>

#include "hub/core/market.h"
#include "hub/core/testing.h"

namespace kvasir::hub {
namespace {

class MarketProof : public testing::Test {
 protected:
  MarketProof() { EXPECT_TRUE(market_.put_model(uniform_model("m", 2, 32, 1'000'000))); }

  CoverageReply send(const std::string& id, Segments holdings, double t) {
    auto reply = market_.coverage(beat(id, std::move(holdings)), at(t));
    EXPECT_TRUE(reply) << reply.error().message;
    return *reply;
  }
  std::uint32_t replicas(std::uint32_t layer, std::uint32_t expert, double t) {
    for (const auto& run : market_.demand("m", at(t)))
      if (run.layer == layer && run.begin <= expert && expert < run.end) return run.replicas();
    return UINT32_MAX;
  }

  Market market_{MarketOptions{}, seeded(3)};
};

TEST_F(MarketProof, ClaimsCountOnlyAfterTheyAreProved) {
  const auto reply = send("A", {{0, 0, 16}}, 0);
  ASSERT_TRUE(reply.challenge);
  EXPECT_EQ(reply.experts_counted, 0u);
  EXPECT_EQ(reply.challenge->spans.size(), kProofSpans);
  for (const ProofSpan& span : reply.challenge->spans) {
    EXPECT_EQ(span.layer, 0u);
    EXPECT_LT(span.expert, 16u);
    EXPECT_EQ(span.length, kProofSpanBytesMax);
    EXPECT_LE(span.offset + span.length, 1'000'000u);
  }
  EXPECT_EQ(replicas(0, 3, 1), 0u);
  EXPECT_EQ(send("A", {{0, 0, 16}}, 1).challenge->id, reply.challenge->id);  // the same one until it is answered
  EXPECT_FALSE(market_.open_challenge("A", "token", "another"));
  EXPECT_FALSE(market_.open_challenge("A", "another token", reply.challenge->id));
  ASSERT_TRUE(market_.open_challenge("A", "token", reply.challenge->id));
  market_.settle_proof("A", reply.challenge->id, true, at(2));
  EXPECT_EQ(replicas(0, 3, 2), 1u);
  EXPECT_FALSE(send("A", {{0, 0, 16}}, 3).challenge);
  EXPECT_FALSE(market_.open_challenge("A", "token", reply.challenge->id));  // used up
}

TEST_F(MarketProof, OnlyWhatIsNewIsAskedForAndTheOldGoesOnCounting) {
  market_.settle_proof("A", send("A", {{0, 0, 16}}, 0).challenge->id, true, at(0));
  const auto reply = send("A", {{0, 0, 16}, {1, 0, 4}}, 1);
  ASSERT_TRUE(reply.challenge);
  for (const ProofSpan& span : reply.challenge->spans) EXPECT_EQ(span.layer, 1u);
  EXPECT_EQ(replicas(0, 3, 1), 1u);
  EXPECT_EQ(replicas(1, 3, 1), 0u);
  market_.settle_proof("A", reply.challenge->id, true, at(2));
  EXPECT_EQ(replicas(1, 3, 2), 1u);
  // Fewer needs no proof; what was dropped counts no more.
  EXPECT_FALSE(send("A", {{1, 0, 4}}, 3).challenge);
  EXPECT_EQ(replicas(0, 3, 3), 0u);
}

TEST_F(MarketProof, AChallengeForOneClaimDoesNotProveAnother) {
  const auto first = send("A", {{0, 0, 8}}, 0);
  const auto second = send("A", {{1, 0, 32}}, 1);
  ASSERT_TRUE(second.challenge);
  EXPECT_NE(first.challenge->id, second.challenge->id);
  market_.settle_proof("A", first.challenge->id, true, at(1));
  EXPECT_EQ(replicas(1, 3, 1), 0u);
  // Claiming more after the challenge was made proves only what it was made for.
  send("A", {{1, 0, 32}, {0, 0, 32}}, 2);
  market_.settle_proof("A", second.challenge->id, true, at(2));
  EXPECT_EQ(replicas(1, 3, 2), 1u);
  EXPECT_EQ(replicas(0, 3, 2), 0u);
}

TEST_F(MarketProof, LiarsAreBarredForAWhile) {
  for (int i = 0; i < 3; ++i) {
    const auto reply = send("A", {{0, 0, 16}}, i);
    ASSERT_TRUE(reply.challenge);
    market_.settle_proof("A", reply.challenge->id, false, at(i));
  }
  EXPECT_FALSE(send("A", {{0, 0, 16}}, 4).challenge);
  for (double t = 10; t < 1700; t += 10) EXPECT_FALSE(send("A", {{0, 0, 16}}, t).challenge);
  double t = 1700;
  while (!send("A", {{0, 0, 16}}, t).challenge) ASSERT_LT(t += 10, 1900);
}

TEST_F(MarketProof, RechecksComeAndAnIgnoredOneCosts) {
  market_.settle_proof("A", send("A", {{0, 0, 16}}, 0).challenge->id, true, at(0));
  double t = 10;
  while (!send("A", {{0, 0, 16}}, t).challenge) ASSERT_LT(t += 10, 700);
  EXPECT_GE(t, 600);
  EXPECT_EQ(replicas(0, 3, t), 1u);
  for (const double end = t + 80; t < end; t += 10) send("A", {{0, 0, 16}}, t);
  EXPECT_EQ(replicas(0, 3, t), 0u);
}

}  // namespace
}  // namespace kvasir::hub
