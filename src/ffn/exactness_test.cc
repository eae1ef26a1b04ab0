// The promise of exact numerics: an engine that holds some of the experts gives, for its
// pairs, the bits that the whole layer gives in one process.
#include <gtest/gtest.h>

#include <cstring>
#include <ostream>

#include "ffn/device.h"
#include "ffn/invariance.h"
#include "ffn/oracle.h"
#include "ffn/testing.h"

namespace kvasir::ffn {
namespace {

using testing::Layer;
using wire::Activation;
using wire::GateLayout;
using wire::Recipe;

constexpr std::uint32_t kWidth = 256, kHidden = 256;
constexpr std::uint32_t kExperts = 12, kUsed = 4;

const ggml_type kTypes[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q8_0,   GGML_TYPE_Q4_0,
                            GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS, GGML_TYPE_MXFP4};

std::unique_ptr<Engine> make_engine(int n_threads = 1, wire::Numerics numerics = wire::Numerics::kExact) {
  return Engine::create({.device = "CPU", .n_threads = n_threads, .numerics = numerics}).value();
}

// The pairs whose expert is in `held`, with local ids, and where each one is in [T][n_used].
struct Subset {
  std::vector<LocalPair> pairs;
  std::vector<std::size_t> places;
};
Subset pairs_of(std::span<const std::int32_t> ids, std::uint32_t n_used, std::span<const std::uint32_t> held) {
  Subset subset;
  for (std::size_t at = 0; at < ids.size(); ++at) {
    for (std::uint32_t local = 0; local < held.size(); ++local) {
      if (held[local] != static_cast<std::uint32_t>(ids[at])) continue;
      subset.pairs.push_back({static_cast<std::uint32_t>(at / n_used), local});
      subset.places.push_back(at);
    }
  }
  return subset;
}

std::size_t count_differing_rows(std::span<const float> whole, std::span<const float> part, const Subset& subset,
                                 std::size_t width) {
  std::size_t differing = 0;
  for (std::size_t i = 0; i < subset.places.size(); ++i)
    differing += std::memcmp(&whole[subset.places[i] * width], &part[i * width], width * sizeof(float)) != 0;
  return differing;
}

class ExactByType : public ::testing::TestWithParam<ggml_type> {
 protected:
  Recipe recipe_{.n_embd = kWidth, .n_ff = kHidden, .n_expert = kExperts};
};

TEST_P(ExactByType, AnySubsetOfExpertsGivesTheRowsOfTheFullCall) {
  const Layer layer = testing::random_layer(recipe_, GetParam(), GetParam(), 1);
  const std::unique_ptr<Engine> one = make_engine(1), two = make_engine(2);
  std::mt19937 rng(2);
  for (std::uint32_t n_tokens : {1u, 2u, 7u, 9u, 23u, 130u}) {
    const std::vector<float> x = testing::random_rows(std::size_t{n_tokens} * kWidth, rng);
    const std::vector<std::int32_t> ids = testing::random_ids(kExperts, kUsed, n_tokens, rng);
    const std::vector<float> whole = testing::full_call(layer, x, ids, kUsed, 1);
    ASSERT_EQ(whole, testing::full_call(layer, x, ids, kUsed, 2)) << "ggml itself depends on the thread count";
    for (std::size_t n_held : {std::size_t{1}, std::size_t{5}, std::size_t{kExperts}}) {
      std::vector<std::uint32_t> held(kExperts);
      for (std::uint32_t e = 0; e < kExperts; ++e) held[e] = e;
      std::shuffle(held.begin(), held.end(), rng);
      held.resize(n_held);
      const Layer slice = testing::slice_layer(layer, held);
      ASSERT_TRUE(Engine::check(slice.recipe, slice.tensors));
      const Subset subset = pairs_of(ids, kUsed, held);
      std::vector<float> part(subset.pairs.size() * kWidth);
      for (Engine* engine : {one.get(), two.get()}) {
        std::ranges::fill(part, -1.f);
        ASSERT_TRUE(engine->compute(slice.recipe, slice.tensors, {x.data(), kWidth, n_tokens}, subset.pairs,
                                    part.data()));
        EXPECT_EQ(count_differing_rows(whole, part, subset, kWidth), 0u)
            << n_tokens << " tokens, " << n_held << " experts, " << subset.pairs.size() << " pairs";
      }
    }
    one->forget_graphs();
    two->forget_graphs();
  }
}

TEST_P(ExactByType, InvariantRowsHaveTheBitsOfTheRowAlone) {
  const Layer layer = testing::random_layer(recipe_, GetParam(), GetParam(), 3);
  const std::unique_ptr<Engine> engine = make_engine(1, wire::Numerics::kInvariant);
  std::mt19937 rng(4);
  constexpr std::uint32_t kTokens = 60;
  const std::vector<float> x = testing::random_rows(std::size_t{kTokens} * kWidth, rng);
  std::vector<LocalPair> pairs;
  for (std::uint32_t i = 0; i < kTokens; ++i) {
    pairs.push_back({i, 2});  // far more rows than any threshold
    if (i % 3 == 0) pairs.push_back({i, 7});
  }
  std::vector<float> together(pairs.size() * kWidth), alone(kWidth);
  ASSERT_TRUE(engine->compute(layer.recipe, layer.tensors, {x.data(), kWidth, kTokens}, pairs, together.data()));
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    ASSERT_TRUE(engine->compute(layer.recipe, layer.tensors, {x.data(), kWidth, kTokens}, std::span(&pairs[i], 1),
                                alone.data()));
    EXPECT_EQ(std::memcmp(alone.data(), &together[i * kWidth], kWidth * sizeof(float)), 0) << "pair " << i;
  }
}

// Watches ggml: fails when a release moves a threshold, so that the table is looked at.
TEST_P(ExactByType, TheTableOfInvariantRowsHoldsOnThisCpu) {
  const Layer layer = testing::random_layer(recipe_, GetParam(), GetParam(), 5);
  const ggml_backend_ptr backend = open_backend(find_device("CPU").value(), 1).value();
  const std::uint32_t limit = invariant_rows_limit(GetParam());
  for (ggml_tensor* matrix : {layer.tensors.up, layer.tensors.down}) {
    const std::uint32_t up_to_16 = probe_invariant_rows(backend.get(), matrix, kInvariantRowsMax).value();
    RecordProperty("invariant_rows", static_cast<int>(up_to_16));
    EXPECT_GE(up_to_16, limit) << ggml_type_name(GetParam()) << ": lower the table in invariance.cc";
  }
}

INSTANTIATE_TEST_SUITE_P(Types, ExactByType, ::testing::ValuesIn(kTypes),
                         [](const auto& tested) { return std::string(ggml_type_name(tested.param)); });

// --- every shape of recipe.h -------------------------------------------------------------

struct Variant {
  std::string name;
  Recipe recipe;
  double tolerance;  // against the oracle; ggml reads GELUs from an f16 table
};
void PrintTo(const Variant& variant, std::ostream* os) { *os << variant.name; }

std::vector<Variant> all_variants() {
  std::vector<Variant> variants;
  const auto add = [&](std::string name, GateLayout layout, Activation activation, double tolerance, auto change) {
    Recipe r{.n_embd = 96, .n_ff = 64, .n_expert = 6};
    r.gate_layout = layout;
    r.activation = activation;
    change(r);
    variants.push_back({std::move(name), r, tolerance});
  };
  const auto plain = [](Recipe&) {};
  const struct { const char* name; Activation activation; double tolerance; } gated[] = {
      {"Swiglu", Activation::kSwiglu, 1e-5},     {"Geglu", Activation::kGeglu, 3e-3},
      {"Reglu", Activation::kReglu, 1e-5},       {"GegluErf", Activation::kGegluErf, 1e-5},
      {"GegluQuick", Activation::kGegluQuick, 3e-3}, {"SwigluOai", Activation::kSwigluOai, 1e-5},
      {"SwigluClamp", Activation::kSwigluClamp, 1e-5},
      {"SiluMul", Activation::kSiluMul, 1e-5}, {"SoftCapSiluMul", Activation::kSoftCapSiluMul, 1e-5}};
  const auto everything = [](Recipe& r) {
    r.gate_scale = r.gate_bias = r.gate_layout == GateLayout::kSplit;
    r.up_scale = r.down_scale = r.up_bias = r.down_bias = true;
    r.clamp_up = {true, -0.4f, 0.5f};
    if (r.gate_layout != GateLayout::kNone) r.clamp_gate = {true, -INFINITY, 0.6f};
    if (r.activation == Activation::kSiluMul) r.clamp_gate_activated = {true, -0.1f, 0.3f};
  };
  for (const auto& g : gated) {
    const auto oai = [&](auto change) {
      return [change, a = g.activation](Recipe& r) {
        if (a == Activation::kSwigluOai) r.alpha = 1.702f, r.limit = 0.7f;
        if (a == Activation::kSoftCapSiluMul) r.cap_gate = {0.5f, 2.0f}, r.cap_up = {0.25f, 4.0f};
        if (a == Activation::kSwigluClamp) r.limit = 0.25f;
        change(r);
      };
    };
    add(std::string(g.name) + "Split", GateLayout::kSplit, g.activation, g.tolerance, oai(plain));
    add(std::string(g.name) + "SplitEverything", GateLayout::kSplit, g.activation, g.tolerance, oai(everything));
    if (g.activation == Activation::kSoftCapSiluMul) continue;  // never merged
    add(std::string(g.name) + "Merged", GateLayout::kMerged, g.activation, g.tolerance, oai(plain));
    add(std::string(g.name) + "MergedEverything", GateLayout::kMerged, g.activation, g.tolerance, oai(everything));
  }
  const struct { const char* name; Activation activation; double tolerance; } ungated[] = {
      {"Silu", Activation::kSilu, 1e-5},       {"Gelu", Activation::kGelu, 3e-3},
      {"Relu", Activation::kRelu, 1e-5},       {"ReluSqr", Activation::kReluSqr, 1e-5},
      {"GeluErf", Activation::kGeluErf, 1e-5}, {"GeluQuick", Activation::kGeluQuick, 3e-3}};
  for (const auto& u : ungated) {
    add(std::string(u.name) + "None", GateLayout::kNone, u.activation, u.tolerance, plain);
    add(std::string(u.name) + "NoneEverything", GateLayout::kNone, u.activation, u.tolerance, everything);
  }
  add("DownScaleOnly", GateLayout::kMerged, Activation::kSwiglu, 1e-5, [](Recipe& r) { r.down_scale = true; });
  add("BiasesOnly", GateLayout::kSplit, Activation::kSwigluOai, 1e-5, [](Recipe& r) {
    r.gate_bias = r.up_bias = r.down_bias = true;
    r.alpha = 1.702f, r.limit = 7.f;
  });
  return variants;
}

class ExactByVariant : public ::testing::TestWithParam<Variant> {};

TEST_P(ExactByVariant, GivesTheRowsOfTheFullCallAndAgreesWithTheOracle) {
  const Recipe& recipe = GetParam().recipe;
  const std::unique_ptr<Engine> engine = make_engine();
  std::mt19937 rng(6);
  for (ggml_type type : {GGML_TYPE_F32, GGML_TYPE_Q8_0}) {
    const Layer layer = testing::random_layer(recipe, type, type, 7);
    ASSERT_TRUE(Engine::check(layer.recipe, layer.tensors)) << Engine::check(layer.recipe, layer.tensors).error().message;
    for (std::uint32_t n_tokens : {1u, 11u}) {
      const std::vector<float> x = testing::random_rows(std::size_t{n_tokens} * recipe.n_embd, rng);
      const std::vector<std::int32_t> ids = testing::random_ids(recipe.n_expert, 3, n_tokens, rng);
      const std::vector<float> whole = testing::full_call(layer, x, ids, 3, 1);
      const std::uint32_t held[] = {4, 0, 3};
      const Layer slice = testing::slice_layer(layer, held);
      const Subset subset = pairs_of(ids, 3, held);
      std::vector<float> part(subset.pairs.size() * recipe.n_embd);
      ASSERT_TRUE(engine->compute(slice.recipe, slice.tensors, {x.data(), recipe.n_embd, n_tokens}, subset.pairs,
                                  part.data()));
      EXPECT_EQ(count_differing_rows(whole, part, subset, recipe.n_embd), 0u) << ggml_type_name(type);
      engine->forget_graphs();
      if (type != GGML_TYPE_F32) continue;
      for (std::size_t i = 0; i < subset.pairs.size(); ++i) {
        std::vector<double> truth(recipe.n_embd);
        ExpertOracle(slice.recipe, slice.tensors, subset.pairs[i].expert)
            .compute(std::span(x).subspan(subset.pairs[i].row * recipe.n_embd, recipe.n_embd), truth);
        for (std::uint32_t c = 0; c < recipe.n_embd; ++c)
          ASSERT_NEAR(part[i * recipe.n_embd + c], truth[c], GetParam().tolerance) << "pair " << i << " value " << c;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Recipes, ExactByVariant, ::testing::ValuesIn(all_variants()),
                         [](const auto& tested) { return tested.param.name; });

TEST(Exact, ARequestPastTheArenaIsCutBetweenExperts) {
  // 64 MiB at 24.6 kB a pair is 2730 pairs; the request has 4000, one expert alone 1200.
  const Recipe recipe{.n_embd = 512, .n_ff = 768, .n_expert = kExperts};
  const Layer layer = testing::random_layer(recipe, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, 8);
  std::mt19937 rng(9);
  constexpr std::uint32_t kTokens = 1000;
  const std::vector<float> x = testing::random_rows(std::size_t{kTokens} * recipe.n_embd, rng);
  const std::vector<std::int32_t> ids = testing::random_ids(kExperts, kUsed, kTokens, rng);
  std::vector<std::uint32_t> held(kExperts);
  for (std::uint32_t e = 0; e < kExperts; ++e) held[e] = e;
  const Subset subset = pairs_of(ids, kUsed, held);
  std::vector<float> part(subset.pairs.size() * recipe.n_embd);
  ASSERT_TRUE(make_engine(2)->compute(recipe, layer.tensors, {x.data(), recipe.n_embd, kTokens}, subset.pairs,
                                      part.data()));
  EXPECT_EQ(count_differing_rows(testing::full_call(layer, x, ids, kUsed, 2), part, subset, recipe.n_embd), 0u);
}

}  // namespace
}  // namespace kvasir::ffn
