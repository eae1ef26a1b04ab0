// Class fast: every plan computes the same FFN, and none allocates once it has run.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdlib>

#include "ffn/device.h"
#include "ffn/placement.h"
#include "ffn/testing.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kCountsAllocations = false;  // sanitizers bring their own malloc
std::atomic<std::uint64_t> n_allocations = 0;
#else
constexpr bool kCountsAllocations = true;
std::atomic<std::uint64_t> n_allocations = 0;
// In front of glibc's, for ggml's libraries too.
extern "C" void* __libc_malloc(std::size_t);
extern "C" void* malloc(std::size_t bytes) {
  n_allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(bytes);
}
#endif

namespace kvasir::ffn {
namespace {

using wire::Activation;
using wire::GateLayout;

wire::Recipe plain() {
  wire::Recipe r;
  r.gate_layout = GateLayout::kSplit;
  r.n_embd = 256;
  r.n_ff = 256;
  r.n_expert = 8;
  return r;
}

wire::Recipe biased() {
  wire::Recipe r = plain();
  r.gate_bias = r.up_bias = r.down_bias = r.gate_scale = r.up_scale = r.down_scale = true;
  r.activation = Activation::kSwigluOai;
  r.alpha = 1.7f;
  r.limit = 7.f;
  return r;
}

wire::Recipe merged() {
  wire::Recipe r = plain();
  r.gate_layout = GateLayout::kMerged;
  r.up_bias = r.down_scale = true;
  r.activation = Activation::kGeglu;
  return r;
}

wire::Recipe ungated() {
  wire::Recipe r = plain();
  r.gate_layout = GateLayout::kNone;
  r.activation = Activation::kReluSqr;
  return r;
}

struct Work {
  std::vector<float> x;
  std::vector<LocalPair> pairs;
  RowsView rows;
};
Work random_work(const wire::Recipe& r, std::uint32_t n_tokens, std::uint32_t n_used, std::uint32_t seed) {
  std::mt19937 rng(seed);
  Work work{.x = testing::random_rows(std::size_t{n_tokens} * r.n_embd, rng), .pairs = {}, .rows = {}};
  const std::vector<std::int32_t> ids = testing::random_ids(r.n_expert, n_used, n_tokens, rng);
  for (std::size_t i = 0; i < ids.size(); ++i)
    work.pairs.push_back({static_cast<std::uint32_t>(i / n_used), static_cast<std::uint32_t>(ids[i])});
  work.rows = {work.x.data(), r.n_embd, n_tokens};
  return work;
}

FastPlans everywhere(const FastPlan& plan) {
  FastPlans plans;
  for (std::uint32_t c = 0; c < kRowClasses; ++c) plans[c] = plan;
  return plans;
}

// 1 - cosine between two outputs.
double distance(std::span<const float> a, std::span<const float> b) {
  double ab = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    ab += double{a[i]} * b[i];
    aa += double{a[i]} * a[i];
    bb += double{b[i]} * b[i];
  }
  return 1 - ab / std::sqrt(aa * bb);
}

// The layer's matrices in the first extra buffer type that takes any; nullopt if none does.
std::optional<PackedMatrices> packed(const testing::Layer& layer) {
  ggml_backend_dev_t cpu = find_device("CPU").value();
  for (ggml_backend_buffer_type_t type : extra_buffer_types(cpu)) {
    PackedMatrices copy = PackedMatrices::plan(cpu, type, layer.tensors).value();
    if (copy.empty()) continue;
    EXPECT_TRUE(copy.allocate());
    for (ggml_tensor* t : {layer.tensors.gate, layer.tensors.up, layer.tensors.gate_up, layer.tensors.down}) {
      if (!t || !copy.takes(t)) continue;
      for (std::uint32_t e = 0; e < layer.tensors.n_local; ++e)
        copy.set(t, e, static_cast<const char*>(t->data) + e * t->nb[2]);
    }
    return copy;
  }
  return std::nullopt;
}

TEST(Fast, EveryPlanAgreesWithTheExactOne) {
  for (const auto& [recipe, name] : {std::pair{plain(), "plain"}, {biased(), "biased"}, {merged(), "merged"},
                                     {ungated(), "ungated"}}) {
    const testing::Layer layer = testing::random_layer(recipe, GGML_TYPE_Q4_K, GGML_TYPE_Q4_K, 7);
    const std::unique_ptr<Engine> engine = Engine::create({.n_threads = 2}).value();
    std::vector<ExpertTensors> copies{layer.tensors};
    const std::optional<PackedMatrices> copy = packed(layer);
    if (copy) copies.push_back(copy->over(layer.tensors));
    // 1 token; a few; so many that experts are cut into blocks and calls.
    for (const std::uint32_t n_tokens : {1u, 9u, 400u}) {
      const Work work = random_work(recipe, n_tokens, 3, n_tokens);
      std::vector<float> exact(work.pairs.size() * recipe.n_embd), fast(exact.size());
      ASSERT_TRUE(engine->compute(recipe, layer.tensors, work.rows, work.pairs, exact.data()));
      for (std::uint32_t c = 0; c < copies.size(); ++c)
        for (const bool per_expert : {false, true})
          for (const std::uint32_t rows_max : {0u, 8u}) {
            engine->set_fast_plans(everywhere({.copy = c, .per_expert = per_expert, .rows_max = rows_max, .n_threads = 1}));
            std::ranges::fill(fast, NAN);
            ASSERT_TRUE(engine->compute_fast(recipe, copies, work.rows, work.pairs, fast.data()));
            // ggml's own kernels for one type stand this far apart.
            EXPECT_LT(distance(exact, fast), 1e-5) << name << ", " << n_tokens << " tokens, copy " << c << ", per expert "
                                                   << per_expert << ", at most " << rows_max << " rows";
          }
    }
  }
}

TEST(Fast, LayersShareAGraphAndKeepTheirOwnWeights) {
  const wire::Recipe recipe = plain();
  const testing::Layer a = testing::random_layer(recipe, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, 1);
  const testing::Layer b = testing::random_layer(recipe, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, 2);
  const std::unique_ptr<Engine> engine = Engine::create({}).value();
  engine->set_fast_plans(everywhere({.per_expert = true}));
  const Work work = random_work(recipe, 5, 2, 3);
  std::vector<float> exact(work.pairs.size() * recipe.n_embd), fast(exact.size());
  for (const testing::Layer* layer : {&a, &b, &a}) {
    ASSERT_TRUE(engine->compute(recipe, layer->tensors, work.rows, work.pairs, exact.data()));
    ASSERT_TRUE(engine->compute_fast(recipe, {&layer->tensors, 1}, work.rows, work.pairs, fast.data()));
    EXPECT_LT(distance(exact, fast), 1e-6);
  }
}

// What ggml itself allocates for each computation, whatever the graph.
std::uint64_t allocations_of_bare_compute() {
  ggml_context_ptr context(ggml_init({ggml_tensor_overhead() * 4 + ggml_graph_overhead(), nullptr, true}));
  ggml_tensor* a = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, 32);
  ggml_cgraph* graph = ggml_new_graph(context.get());
  ggml_build_forward_expand(graph, ggml_add(context.get(), a, a));
  const ggml_backend_ptr backend = open_backend(find_device("CPU").value(), 1).value();
  const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(context.get(), backend.get()));
  ggml_backend_graph_compute(backend.get(), graph);
  const std::uint64_t before = n_allocations;
  ggml_backend_graph_compute(backend.get(), graph);
  return n_allocations - before;
}

TEST(Fast, NothingIsAllocatedAfterTheFirstRequestOfAShape) {
  if (!kCountsAllocations) GTEST_SKIP() << "a sanitizer's malloc is in place";
  const std::uint64_t ggmls_own = allocations_of_bare_compute();
  EXPECT_LE(ggmls_own, 2u);
  const wire::Recipe recipe = plain();
  const testing::Layer layer = testing::random_layer(recipe, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, 7);
  const std::unique_ptr<Engine> engine = Engine::create({}).value();
  for (const bool per_expert : {false, true}) {
    engine->set_fast_plans(everywhere({.per_expert = per_expert}));
    // The same number of pairs over other experts each time.
    std::vector<float> out(std::size_t{16} * recipe.n_embd);
    for (std::uint32_t round = 0; round < 4; ++round) {
      const Work work = random_work(recipe, 4, 4, round);
      const std::uint64_t before = n_allocations;
      ASSERT_TRUE(engine->compute(recipe, layer.tensors, work.rows, work.pairs, out.data()));
      ASSERT_TRUE(engine->compute_fast(recipe, {&layer.tensors, 1}, work.rows, work.pairs, out.data()));
      if (round == 0) EXPECT_GT(n_allocations, before) << "the counter does not count";
      else EXPECT_EQ(n_allocations, before + 2 * ggmls_own) << (per_expert ? "per expert" : "stacked") << ", request " << round;
    }
  }
}

TEST(Fast, MeanRowsPerExpertChooseTheClass) {
  EXPECT_EQ(FastPlans::class_of(8, 8), 0u);
  EXPECT_EQ(FastPlans::class_of(15, 8), 0u);
  EXPECT_EQ(FastPlans::class_of(16, 8), 1u);
  EXPECT_EQ(FastPlans::class_of(64 * 64, 64), 6u);
  EXPECT_EQ(FastPlans::class_of(100'000, 2), kRowClasses - 1);
}

}  // namespace
}  // namespace kvasir::ffn
