// Experts shared out among threads: the same bits whoever computes them.
#include "ffn/lane_engine.h"

#include <gtest/gtest.h>

#include <atomic>

#include "ffn/testing.h"

namespace kvasir::ffn {
namespace {

TEST(Crew, EveryPieceIsDoneOnceAndAllHaveReturned) {
  Crew crew(3);
  std::vector<int> done(100);
  for (std::uint32_t round = 0; round < 2000; ++round) {
    const std::uint32_t n_pieces = round % 100;
    std::ranges::fill(done, 0);
    std::atomic<std::uint32_t> next = 0;
    // More helpers than there are, fewer, none.
    crew.run(round % 6, [&](std::uint32_t i) {
      EXPECT_LE(i, 3u);
      for (std::uint32_t piece; (piece = next.fetch_add(1)) < n_pieces;) ++done[piece];
    });
    for (std::uint32_t piece = 0; piece < done.size(); ++piece) ASSERT_EQ(done[piece], piece < n_pieces ? 1 : 0);
    // Past the helpers' spin: some of them sleep, then.
    if (round % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

wire::Recipe wide_recipe(std::uint32_t n_expert) {
  wire::Recipe r;
  r.gate_layout = wire::GateLayout::kSplit;
  r.n_embd = 512;
  r.n_ff = 512;  // so much that threads are woken for a single expert
  r.n_expert = n_expert;
  return r;
}

TEST(LaneEngine, TheBitsDoNotDependOnTheNumberOfThreads) {
  constexpr std::uint32_t kExperts = 11;
  const wire::Recipe recipe = wide_recipe(kExperts);
  const testing::Layer layer = testing::random_layer(recipe, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, 3);
  std::mt19937 rng(1);
  const std::unique_ptr<Engine> one = Engine::create({}).value(), engine = Engine::create({.n_threads = 2}).value();
  // One row over some experts, a few, and so many that experts differ much in their rows.
  for (const auto& [n_rows, n_used] : {std::pair{1u, 1u}, {1u, 2u}, {1u, 5u}, {1u, 8u}, {3u, 2u}, {40u, 3u}, {300u, 2u}}) {
    const std::vector<float> x = testing::random_rows(std::size_t{n_rows} * recipe.n_embd, rng);
    const std::vector<std::int32_t> ids = testing::random_ids(kExperts, n_used, n_rows, rng);
    std::vector<LocalPair> pairs;
    for (std::size_t i = 0; i < ids.size(); ++i)
      pairs.push_back({static_cast<std::uint32_t>(i / n_used), static_cast<std::uint32_t>(ids[i])});
    const RowsView rows{x.data(), recipe.n_embd, n_rows};
    for (const wire::Numerics numerics : {wire::Numerics::kExact, wire::Numerics::kInvariant}) {
      std::vector<float> expected(pairs.size() * recipe.n_embd);
      ASSERT_TRUE(one->compute(numerics, recipe, layer.tensors, rows, pairs, expected.data()));
      for (const int n_threads : {1, 2, 3, 5, 8, 2}) {
        engine->set_n_threads(n_threads);
        std::vector<float> out(expected.size());
        ASSERT_TRUE(engine->compute(numerics, recipe, layer.tensors, rows, pairs, out.data()));
        ASSERT_EQ(out, expected) << n_rows << " rows, " << n_used << " experts each, " << n_threads << " threads";
      }
    }
  }
}

}  // namespace
}  // namespace kvasir::ffn
