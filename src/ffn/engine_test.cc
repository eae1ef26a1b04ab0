#include "ffn/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "ffn/device.h"
#include "ffn/testing.h"

namespace kvasir::ffn {
namespace {

using ::testing::HasSubstr;
using testing::Layer;
using wire::Activation;
using wire::GateLayout;
using wire::Recipe;

const Recipe kSmall{.n_embd = 64, .n_ff = 32, .n_expert = 4};

std::string refusal(const Recipe& recipe, const ExpertTensors& tensors) {
  const Status status = Engine::check(recipe, tensors);
  return status ? "accepted" : status.error().message;
}

TEST(EngineCreate, NamesTheDevicesThereAre) {
  const auto engine = Engine::create({.device = "Abacus0"});
  ASSERT_FALSE(engine);
  EXPECT_THAT(engine.error().message, HasSubstr("There is no device 'Abacus0'; ggml offers"));
  EXPECT_THAT(engine.error().message, HasSubstr("CPU"));
  EXPECT_FALSE(Engine::create({.n_threads = 0}));
  EXPECT_FALSE(Engine::create({.n_threads = kThreadsMax + 1}));
}

TEST(EngineCheck, SaysWhichTensorDoesNotFit) {
  Layer layer = testing::random_layer(kSmall, GGML_TYPE_F32, GGML_TYPE_F32, 1);
  EXPECT_EQ(refusal(kSmall, layer.tensors), "accepted");

  ExpertTensors missing = layer.tensors;
  missing.down = nullptr;
  EXPECT_EQ(refusal(kSmall, missing), "The recipe needs the tensor down, which is not held.");

  Recipe wider = kSmall;
  wider.n_ff = 64;
  ggml_set_name(layer.tensors.gate, "blk.3.ffn_gate_exps.weight");
  EXPECT_EQ(refusal(wider, layer.tensors),
            "blk.3.ffn_gate_exps.weight has the shape [64, 32, 4], but the recipe needs [64, 64, 4].");

  Recipe biased = kSmall;
  biased.up_bias = true;
  EXPECT_EQ(refusal(biased, layer.tensors), "The recipe needs the tensor up_bias, which is not held.");

  Recipe merged = kSmall;
  merged.gate_layout = GateLayout::kMerged;
  EXPECT_THAT(refusal(merged, layer.tensors), HasSubstr("gate_up"));

  const ggml_type stored = layer.tensors.up->type;
  layer.tensors.up->type = GGML_TYPE_I32;
  EXPECT_THAT(refusal(kSmall, layer.tensors), HasSubstr("is of type i32"));
  layer.tensors.up->type = GGML_TYPE_Q8_K;  // ggml's own intermediate: multiplying by it would abort
  EXPECT_THAT(refusal(kSmall, layer.tensors), HasSubstr("is of type q8_K"));
  layer.tensors.up->type = stored;
}

// wire::validate has tests of its own; this is that check() asks it.
TEST(EngineCheck, RefusesRecipesThatMakeNoSense) {
  const Layer layer = testing::random_layer(kSmall, GGML_TYPE_F32, GGML_TYPE_F32, 1);
  const auto changed = [&](auto change) {
    Recipe recipe = kSmall;
    change(recipe);
    return refusal(recipe, layer.tensors);
  };
  EXPECT_THAT(changed([](Recipe& r) { r.activation = Activation::kGelu; }), HasSubstr("does not fit"));
  EXPECT_THAT(changed([](Recipe& r) { r.activation = Activation(200); }), HasSubstr("activation is unknown"));
  EXPECT_THAT(changed([](Recipe& r) { r.gate_layout = GateLayout(9); }), HasSubstr("layout is unknown"));
  EXPECT_THAT(changed([](Recipe& r) { r.n_embd = 0; }), HasSubstr("widths"));
  EXPECT_THAT(changed([](Recipe& r) { r.clamp_up = {true, NAN, 1.f}; }), HasSubstr("bounds"));
}

TEST(EngineCheck, IgnoresTensorsTheRecipeDoesNotName) {
  Recipe biased = kSmall;
  biased.up_bias = biased.down_scale = true;
  const Layer layer = testing::random_layer(biased, GGML_TYPE_F32, GGML_TYPE_F32, 1);
  EXPECT_EQ(refusal(kSmall, layer.tensors), "accepted");
  // and computes without them
  Layer bare = testing::random_layer(kSmall, GGML_TYPE_F32, GGML_TYPE_F32, 1);
  bare.tensors.gate = layer.tensors.gate, bare.tensors.up = layer.tensors.up, bare.tensors.down = layer.tensors.down;
  std::mt19937 rng(2);
  const std::vector<float> x = testing::random_rows(64, rng);
  const LocalPair pair{0, 3};
  std::vector<float> with(64), without(64);
  const auto engine = Engine::create({}).value();
  ASSERT_TRUE(engine->compute(kSmall, layer.tensors, {x.data(), 64, 1}, {&pair, 1}, with.data()));
  ASSERT_TRUE(engine->compute(kSmall, bare.tensors, {x.data(), 64, 1}, {&pair, 1}, without.data()));
  EXPECT_EQ(with, without);
}

TEST(EngineCompute, GraphsOfAllShapesShareOneArena) {
  // Small and large requests in turn: cached graphs must survive, or be dropped, as the
  // arena grows under them.
  const Layer layer = testing::random_layer(kSmall, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, 1);
  const auto engine = Engine::create({}).value();
  std::mt19937 rng(3);
  constexpr std::uint32_t kRows = 40;
  const std::vector<float> x = testing::random_rows(kRows * 64, rng);
  std::vector<std::vector<float>> alone;
  for (std::uint32_t row = 0; row < kRows; ++row) {
    const LocalPair pair{row, row % 4};
    std::vector<float> out(64);
    ASSERT_TRUE(Engine::create({}).value()->compute(kSmall, layer.tensors, {x.data(), 64, kRows}, {&pair, 1},
                                                    out.data()));
    alone.push_back(out);
  }
  for (int round = 0; round < 300; ++round) {
    const std::uint32_t n = 1u << rng() % 9;  // past and below kCachedPairsMax
    std::vector<LocalPair> pairs(n);
    for (LocalPair& pair : pairs) {
      pair.row = static_cast<std::uint32_t>(rng() % kRows);
      pair.expert = pair.row % 4;
    }
    std::vector<float> out(std::size_t{n} * 64);
    ASSERT_TRUE(engine->compute(kSmall, layer.tensors, {x.data(), 64, kRows}, pairs, out.data()));
    for (std::uint32_t i = 0; i < n; ++i)  // Q8_0 has no threshold: rows are as if alone
      ASSERT_EQ(std::vector<float>(&out[i * 64], &out[i * 64] + 64), alone[pairs[i].row]) << n << " pairs, " << i;
  }
}

TEST(EngineCompute, ReadsRowsAtTheirStride) {
  const Layer layer = testing::random_layer(kSmall, GGML_TYPE_F32, GGML_TYPE_F32, 1);
  const auto engine = Engine::create({}).value();
  std::mt19937 rng(4);
  const std::vector<float> strided = testing::random_rows(3 * 100, rng);
  std::vector<float> packed;
  for (int row = 0; row < 3; ++row) packed.insert(packed.end(), &strided[row * 100], &strided[row * 100] + 64);
  const LocalPair pairs[] = {{2, 1}, {0, 1}, {1, 3}};
  std::vector<float> a(3 * 64), b(3 * 64);
  ASSERT_TRUE(engine->compute(kSmall, layer.tensors, {strided.data(), 100, 3}, pairs, a.data()));
  ASSERT_TRUE(engine->compute(kSmall, layer.tensors, {packed.data(), 64, 3}, pairs, b.data()));
  EXPECT_EQ(a, b);
  EXPECT_TRUE(engine->compute(kSmall, layer.tensors, {packed.data(), 64, 3}, {}, nullptr));
}

TEST(NumericsId, IsStableAndQuick) {
  const auto first = numerics_id();
  ASSERT_TRUE(first) << first.error().message;
  const auto start = std::chrono::steady_clock::now();
  const auto second = numerics_id();
  const double took_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  ASSERT_TRUE(second);
  EXPECT_EQ(*first, *second);
  EXPECT_EQ(first->ggml_version, ggml_version());
  EXPECT_FALSE(first->cpu_variant.empty());
  EXPECT_NE(first->probe, wire::NumericsId{}.probe);
  RecordProperty("took_us", static_cast<int>(took_ms * 1000));
  EXPECT_LT(took_ms, 500);  // a few ms; the margin is for busy machines and sanitizers
}

}  // namespace
}  // namespace kvasir::ffn
