#include "hub/core/market.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "hub/core/testing.h"

namespace kvasir::hub {
namespace {

Market seed_market() {
  Market market(without_proof(), seeded(1));
  EXPECT_TRUE(market.put_model(uniform_model("m", 1, 256)));
  EXPECT_TRUE(market.coverage(beat("A", {{0, 0, 128}}), at(0)));
  EXPECT_TRUE(market.coverage(beat("B", {{0, 128, 256}}), at(0)));
  EXPECT_TRUE(market.coverage(beat("C", {{0, 0, 128}}), at(0)));
  return market;
}

Assignment assigned(Market& market, const Offer& offer, TimePoint now) {
  auto answer = market.volunteer(offer, now);
  EXPECT_TRUE(answer) << answer.error().message;
  EXPECT_TRUE(*answer);
  return **answer;
}

TEST(Market, DemandFoldsReplicasIntoRanges) {
  Market market = seed_market();
  const auto runs = market.demand("m", at(1));
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(std::tuple(runs[0].begin, runs[0].end, runs[0].replicas(), runs[0].target), std::tuple(0u, 128u, 2u, 2u));
  EXPECT_EQ(runs[0].scarcity(), 0.0);
  EXPECT_EQ(std::tuple(runs[1].begin, runs[1].end, runs[1].replicas(), runs[1].target), std::tuple(128u, 256u, 1u, 2u));
  EXPECT_EQ(runs[1].scarcity(), 0.5);
}

TEST(Market, AVolunteerGetsTheScarcestRangeClippedToItsBudget) {
  Market market = seed_market();
  const Assignment got = assigned(market, offer_experts(64), at(1));
  ASSERT_EQ(got.runs.size(), 1u);
  const auto& run = got.runs[0];
  EXPECT_EQ(std::tuple(run.layer, run.begin, run.end, run.replicas(), run.target), std::tuple(0u, 128u, 192u, 1u, 2u));
  EXPECT_EQ(run.scarcity(), 0.5);
  // The next one sees the reservation.
  EXPECT_EQ(assigned(market, offer_experts(64), at(1)).runs[0].begin, 192u);
  EXPECT_FALSE(market.volunteer(offer_experts(64), at(1))->has_value());
}

TEST(Market, NodesAndReservationsRunOut) {
  Market market = seed_market();
  assigned(market, offer_experts(128), at(1));
  EXPECT_FALSE(market.volunteer(offer_experts(64), at(2))->has_value());
  ASSERT_TRUE(market.coverage(beat("B", {{0, 128, 256}}), at(29)));
  EXPECT_EQ(market.node_count(), 3u);
  EXPECT_EQ(market.demand("m", at(31)).size(), 2u);  // A and C are gone
  EXPECT_EQ(market.node_count(), 1u);
  EXPECT_EQ(market.demand("m", at(31))[0].replicas(), 0u);
  EXPECT_EQ(market.demand("m", at(58))[1].replicas(), 2u);  // B and the reservation
  EXPECT_EQ(market.demand("m", at(62)).size(), 1u);
}

TEST(Market, ReservationBecomesAHoldingWithoutCountingTwice) {
  Market market(without_proof(), seeded(1));
  ASSERT_TRUE(market.put_model(uniform_model("m", 1, 64)));
  const Assignment got = assigned(market, offer_experts(64), at(0));
  Coverage fetching = beat("A", {});
  fetching.reservation = got.reservation;
  for (double t = 10; t <= 300; t += 10) ASSERT_TRUE(market.coverage(fetching, at(t)));  // a long download keeps it
  EXPECT_EQ(market.demand("m", at(301))[0].replicas(), 1u);
  Coverage done = beat("A", {{0, 0, 64}});
  done.reservation = got.reservation;
  ASSERT_TRUE(market.coverage(done, at(302)));
  EXPECT_EQ(market.demand("m", at(302))[0].replicas(), 1u);
  EXPECT_EQ(market.reservation_count(), 0u);
}

TEST(Market, ANamedVolunteerThatAsksAgainGivesItsPlaceUp) {
  Market market(without_proof(), seeded(1));
  ASSERT_TRUE(market.put_model(uniform_model("m", 1, 64)));
  Offer offer = offer_experts(64);
  offer.worker_id = "A";
  assigned(market, offer, at(0));
  assigned(market, offer, at(1));
  EXPECT_EQ(market.reservation_count(), 1u);
  offer.owner = "someone else";  // cannot cancel another's
  assigned(market, offer, at(1));
  EXPECT_EQ(market.reservation_count(), 2u);
  ASSERT_TRUE(market.coverage(beat("A", {{0, 0, 64}}), at(2)));  // holds it now
  EXPECT_EQ(market.demand("m", at(2))[0].replicas(), 2u);
}

TEST(Market, ManyAtOnceSpreadOutEvenly) {
  Market market(without_proof(), seeded(1));
  ASSERT_TRUE(market.put_model(uniform_model("m", 8, 64)));
  for (int i = 0; i < 64; ++i) assigned(market, offer_experts(16), at(0));
  for (const auto& run : market.demand("m", at(0))) EXPECT_EQ(run.replicas(), 2u);
  EXPECT_FALSE(market.volunteer(offer_experts(16), at(0))->has_value());
}

TEST(Market, ALargeOfferTakesSeveralLayersAndNothingTwice) {
  Market market(without_proof(), seeded(1));
  ASSERT_TRUE(market.put_model(uniform_model("m", 4, 32, 1000)));
  Offer offer;
  offer.owner = "token";
  offer.bytes_max = 100'500;
  const Assignment got = assigned(market, offer, at(0));
  std::vector<Segment> segments;
  std::uint64_t total = 0;
  for (const auto& run : got.runs) {
    segments.push_back({run.layer, run.begin, run.end});
    total += run.size();
  }
  EXPECT_EQ(total, 100u);
  EXPECT_EQ(count_experts(normalize(segments)), 100u);
  EXPECT_EQ(got.runs.size(), 4u);
  EXPECT_EQ(got.model->name, "m");
}

TEST(Market, SmallHolesAreFilledByUsefulSlices) {
  Market market(without_proof(), seeded(1));
  ASSERT_TRUE(market.put_model(uniform_model("m", 1, 32)));
  for (const char* id : {"A", "B"}) ASSERT_TRUE(market.coverage(beat(id, {{0, 0, 17}, {0, 18, 32}}), at(0)));
  const Assignment got = assigned(market, offer_experts(16), at(1));
  ASSERT_EQ(got.runs.size(), 1u);
  EXPECT_EQ(got.runs[0].begin, 17u);
  EXPECT_EQ(got.runs[0].size(), 4u);  // experts_min, around the hole
  EXPECT_EQ(got.runs[0].scarcity(), 1.0);
}

TEST(Market, OffersOfNoUseAreRefusedWithASentence) {
  Market market = seed_market();
  EXPECT_FALSE(market.volunteer(offer_experts(3), at(1)));
  Offer bytes;
  bytes.bytes_max = 3999;
  EXPECT_NE(market.volunteer(bytes, at(1)).error().message.find("4000"), std::string::npos);
  EXPECT_FALSE(market.volunteer(Offer{}, at(1)));
  EXPECT_FALSE(market.volunteer(offer_experts(64, "unknown"), at(1)));
}

TEST(Market, AnyModelMeansTheNeediest) {
  Market market = seed_market();
  ASSERT_TRUE(market.put_model(uniform_model("new", 2, 8)));
  EXPECT_EQ(assigned(market, offer_experts(8, ""), at(1)).model->name, "new");
}

TEST(Market, CoverageOutsideTheModelIsRefused) {
  Market market = seed_market();
  EXPECT_FALSE(market.coverage(beat("D", {{1, 0, 8}}), at(1)));
  EXPECT_FALSE(market.coverage(beat("D", {{0, 200, 257}}), at(1)));
  EXPECT_FALSE(market.coverage(beat("D", {{0, 0, 8}}, "other"), at(1)));
  Coverage thief = beat("A", {{0, 0, 8}});
  thief.owner = "another token";
  EXPECT_FALSE(market.coverage(thief, at(1)));
}

TEST(Market, SlowNodesCountForLess) {
  Market market(without_proof(), seeded(1));
  ASSERT_TRUE(market.put_model(uniform_model("m", 1, 64)));
  const auto send = [&](const char* id, double speed, double t) {
    Coverage c = beat(id, {{0, 0, 64}});
    c.speed_rows_per_s = speed;
    ASSERT_TRUE(market.coverage(c, at(t)));
  };
  for (double t : {0.0, 1.0}) {
    send("fast", 10'000, t);
    send("usual", 9000, t);
    send("slow", 1000, t);
    send("other", 8500, t);
  }
  const auto run = market.demand("m", at(2))[0];
  EXPECT_EQ(run.replicas(), 4u);
  EXPECT_EQ(run.weight, 3 * kWeightUnit + kWeightUnit / 4);
}

TEST(Market, DrainingNodesDoNotCount) {
  Market market = seed_market();
  Coverage leaving = beat("B", {{0, 128, 256}});
  leaving.draining = true;
  ASSERT_TRUE(market.coverage(leaving, at(1)));
  EXPECT_EQ(market.demand("m", at(1))[1].replicas(), 0u);
  ASSERT_TRUE(market.coverage(beat("B", {{0, 128, 256}}), at(2)));
  EXPECT_EQ(market.demand("m", at(2))[1].replicas(), 1u);
}

TEST(Market, OnlySpareNodesMoveAndRarely) {
  Market market(without_proof(), seeded(1));
  ASSERT_TRUE(market.put_model(uniform_model("m", 2, 64)));
  // Layer 0 has four replicas, layer 1 none; two nodes are spare.
  std::map<std::string, std::vector<double>> moves;
  for (double t = 0; t < 2 * 3600; t += 10)
    for (const char* id : {"A", "B", "C", "D"}) {
      const auto reply = market.coverage(beat(id, {{0, 0, 64}}), at(t));
      ASSERT_TRUE(reply);
      if (reply->move && (moves[id].empty() || t - moves[id].back() > 1000)) moves[id].push_back(t);
    }
  std::size_t n_moves = 0;
  for (const auto& [id, times] : moves) {
    EXPECT_GE(times.front(), 60);  // the hole has stood open first
    for (std::size_t i = 1; i < times.size(); ++i) EXPECT_GE(times[i] - times[i - 1], 3600);
    n_moves += times.size();
  }
  EXPECT_GE(n_moves, 2u);
  // They did not obey, so their experts count again in the end.
  market.advance(at(7200));
  const auto run = market.demand("m", at(7200))[0];
  EXPECT_EQ(run.replicas() + (run.replicas() < 4 ? 2 : 0), 4u);
}

TEST(Market, ANodeThatMovesIsReplacedByNothingItHeld) {
  Market market(without_proof(), seeded(1));
  ASSERT_TRUE(market.put_model(uniform_model("m", 2, 64)));
  bool moved = false;
  Segments holdings_of_c = {{0, 0, 64}};
  for (double t = 0; t < 200; t += 10) {
    const auto reply = market.coverage(beat("C", holdings_of_c), at(t));
    for (const char* id : {"A", "B"}) ASSERT_TRUE(market.coverage(beat(id, {{0, 0, 64}}), at(t)));
    ASSERT_TRUE(reply);
    if (reply->move) {
      ASSERT_FALSE(moved);
      moved = true;
      Offer offer = offer_experts(64);
      offer.worker_id = "C";
      const auto run = assigned(market, offer, at(t)).runs[0];
      EXPECT_EQ(run.layer, 1u);
      holdings_of_c = {{run.layer, run.begin, run.end}};
    }
  }
  EXPECT_TRUE(moved);
  EXPECT_EQ(market.demand("m", at(200))[0].replicas(), 2u);
  EXPECT_EQ(market.demand("m", at(200))[1].replicas(), 1u);
}

TEST(Market, ReplacingAModelForgetsItsNodes) {
  Market market = seed_market();
  assigned(market, offer_experts(64), at(1));
  ASSERT_TRUE(market.put_model(uniform_model("m", 1, 128)));
  EXPECT_EQ(market.node_count(), 0u);
  EXPECT_EQ(market.reservation_count(), 0u);
  EXPECT_EQ(market.demand("m", at(1))[0].replicas(), 0u);
}

// Against a model that keeps every node and reservation in a list and counts cell by cell.
class Naive {
 public:
  struct Holder {
    Segments segments;
    double until;
  };
  std::map<std::string, Holder> nodes, reservations;

  std::uint32_t replicas(std::uint32_t layer, std::uint32_t expert, double now) const {
    std::uint32_t n = 0;
    for (const auto* kind : {&nodes, &reservations})
      for (const auto& [id, holder] : *kind)
        n += holder.until > now && contains(holder.segments, layer, expert) ? 1 : 0;
    return n;
  }
};

TEST(Market, AgreesWithANaiveModelUnderRandomTraffic) {
  constexpr std::uint32_t kLayers = 3, kExperts = 24;
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    std::mt19937_64 random(seed);
    MarketOptions options = without_proof();
    options.move_after = std::chrono::hours(100);  // nodes on the move do not count
    Market market(options, seeded(seed));
    ASSERT_TRUE(market.put_model(uniform_model("m", kLayers, kExperts)));
    Naive naive;
    std::uint64_t tenths = 5;
    for (int step = 0; step < 300; ++step) {
      tenths += random() % 80;
      const double now = static_cast<double>(tenths) / 10;
      if (random() % 2 == 0) {
        const std::string id = "n" + std::to_string(random() % 10);
        std::vector<Segment> holdings;
        for (std::uint64_t i = random() % 4; i > 0; --i) {
          const auto begin = static_cast<std::uint32_t>(random() % kExperts);
          holdings.push_back({static_cast<std::uint32_t>(random() % kLayers), begin,
                              begin + static_cast<std::uint32_t>(random() % (kExperts - begin + 1))});
        }
        const Segments clean = normalize(holdings);
        ASSERT_TRUE(market.coverage(beat(id, clean), at(now)));
        naive.nodes[id] = {clean, now + 30.05};
      } else {
        const auto answer = market.volunteer(offer_experts(4 + random() % 40), at(now));
        ASSERT_TRUE(answer);
        double best = 0;
        for (std::uint32_t l = 0; l < kLayers; ++l)
          for (std::uint32_t e = 0; e < kExperts; ++e) best = std::max(best, scarcity(naive.replicas(l, e, now), 2));
        ASSERT_EQ(answer->has_value(), best > 0) << "seed " << seed << " step " << step;
        if (*answer) {
          ASSERT_EQ((*answer)->runs[0].scarcity(), best);
          std::vector<Segment> segments;
          for (const auto& run : (*answer)->runs) segments.push_back({run.layer, run.begin, run.end});
          naive.reservations[(*answer)->reservation] = {
              normalize(segments), now - 0.05 + std::chrono::duration<double>((*answer)->expires_in).count()};
        }
      }
      for (const auto& run : market.demand("m", at(now)))
        for (std::uint32_t e = run.begin; e < run.end; ++e)
          ASSERT_EQ(run.replicas(), naive.replicas(run.layer, e, now))
              << "seed " << seed << " step " << step << " t " << now;
    }
  }
}

TEST(Market, ANodeWhoseLineEndsCountsForNothingUntilItIsHeardOf) {
  Market market = seed_market();
  const auto replicas = [&](double t) { return market.demand("m", at(t))[0].replicas(); };
  market.line_ended("A", at(1));
  EXPECT_EQ(replicas(1.5), 2u);  // it may be the network's doing
  EXPECT_EQ(replicas(1.8), 1u);
  market.line_ended("A", at(2));  // once more changes nothing
  EXPECT_EQ(replicas(3), 1u);
  ASSERT_TRUE(market.coverage(beat("A", {{0, 0, 128}}), at(4)));
  EXPECT_EQ(replicas(4), 2u);
  // Heard of in time, or with a new line: it was never missed.
  market.line_ended("A", at(5));
  ASSERT_TRUE(market.coverage(beat("A", {{0, 0, 128}}), at(5.2)));
  EXPECT_EQ(replicas(6), 2u);
  market.line_ended("A", at(7));
  market.line_opened("A");
  EXPECT_EQ(replicas(8), 2u);
  // A lost node that changes its experts is counted once.
  market.line_ended("A", at(9));
  EXPECT_EQ(replicas(10), 1u);
  ASSERT_TRUE(market.coverage(beat("A", {{0, 0, 64}}), at(11)));
  const auto runs = market.demand("m", at(11));
  EXPECT_EQ(std::tuple(runs[0].end, runs[0].replicas()), std::tuple(64u, 2u));
  EXPECT_EQ(std::tuple(runs[1].end, runs[1].replicas()), std::tuple(256u, 1u));
  market.line_ended("nobody", at(12));
  EXPECT_TRUE(market.remove_node("A", at(13)));
  EXPECT_EQ(market.find_owner("A"), "");
  EXPECT_EQ(market.find_owner("B"), "token");
}

}  // namespace
}  // namespace kvasir::hub
