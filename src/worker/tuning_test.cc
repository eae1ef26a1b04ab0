// Copies of the experts for class fast, and the choice of plans at a worker's start.
#include "worker/tuning.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "ffn/device.h"
#include "worker/greeting.h"
#include "worker/testing.h"

namespace kvasir::worker {
namespace {

using ::testing::HasSubstr;

class TuningTest : public ::testing::Test {
 protected:
  void SetUp() override { testing::make_model(model_, {}); }

  SliceStore load(Packing packing, std::uint64_t bytes_max = 0) {
    StoreOptions options;
    options.bytes_max = bytes_max;
    options.packing = packing;
    return SliceStore::load(std::vector{model_}, options).value();
  }
  // One row through every held expert of the first layer.
  static std::vector<float> outputs(const SliceStore& store, ffn::Engine& engine, bool fast) {
    const HeldLayer& layer = *store.layers()[0];
    const wire::Recipe recipe = plain_swiglu_recipe(layer).value();
    const std::vector<float> x = testing::random_rows(recipe.n_embd, 5);
    std::vector<ffn::LocalPair> pairs;
    for (std::uint32_t e = 0; e < layer.tensors.n_local; ++e) pairs.push_back({0, e});
    std::vector<float> out(pairs.size() * recipe.n_embd);
    const ffn::RowsView rows{x.data(), recipe.n_embd, 1};
    EXPECT_TRUE(fast ? engine.compute_fast(recipe, layer.copies, rows, pairs, out.data())
                     : engine.compute(recipe, layer.tensors, rows, pairs, out.data()));
    return out;
  }
  static double largest_difference(std::span<const float> a, std::span<const float> b) {
    double most = 0;
    for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(double{a[i]} - b[i]));
    return most;
  }

  testing::TempDir dir_;
  const std::string model_ = dir_ / "model.gguf", cache_ = dir_ / "deep/plans";
};

TEST_F(TuningTest, CopiesHoldTheSameExpertsAndTheirBytesAreCounted) {
  const auto engine = ffn::Engine::create({}).value();
  const SliceStore plain = load(Packing::kNone), instead = load(Packing::kInstead);
  EXPECT_TRUE(plain.plain());
  EXPECT_EQ(plain.packed_bytes(), 0u);
  if (instead.packed_bytes() == 0) GTEST_SKIP() << "this CPU has no kernels for rearranged weights";
  EXPECT_FALSE(instead.plain());
  EXPECT_EQ(instead.layers()[0]->copies.size(), 1u);
  const SliceStore beside = load(Packing::kBeside, plain.bytes() + instead.packed_bytes());
  EXPECT_TRUE(beside.plain());
  EXPECT_EQ(beside.layers()[0]->copies.size(), 2u);
  EXPECT_EQ(beside.bytes(), plain.bytes() + beside.packed_bytes());

  const std::vector<float> exact = outputs(plain, *engine, false);
  EXPECT_EQ(outputs(beside, *engine, false), exact) << "the plain copy is what it was";
  ffn::FastPlans plans;
  for (const bool per_expert : {false, true})
    for (const std::uint32_t copy : {0u, 1u}) {
      for (std::uint32_t c = 0; c < ffn::kRowClasses; ++c) plans[c] = {.copy = copy, .per_expert = per_expert};
      engine->set_fast_plans(plans);
      EXPECT_LT(largest_difference(outputs(beside, *engine, true), exact), 1e-3);
      EXPECT_LT(largest_difference(outputs(instead, *engine, true), exact), 1e-3);
    }
}

TEST_F(TuningTest, ExpandedWeightsAreThoseOfTheFile) {
  const auto engine = ffn::Engine::create({}).value();
  const SliceStore plain = load(Packing::kNone), expanded = load(Packing::kExpanded);
  EXPECT_FALSE(expanded.plain());
  EXPECT_GT(expanded.bytes(), 3 * plain.bytes());
  for (const ggml_tensor* matrix : {expanded.layers()[0]->tensors.up, expanded.layers()[0]->tensors.down})
    EXPECT_EQ(matrix->type, GGML_TYPE_F32);
  const std::vector<float> rounded = outputs(plain, *engine, false), zero(rounded.size());
  const double difference = largest_difference(outputs(expanded, *engine, true), rounded);
  EXPECT_GT(difference, 0) << "the activations were rounded after all";
  EXPECT_LT(difference, 0.1 * largest_difference(zero, rounded));
}

TEST_F(TuningTest, ASecondCopyIsLeftOutWhereMemoryHasNoRoomForIt) {
  const SliceStore plain = load(Packing::kNone);
  const SliceStore tight = load(Packing::kBeside, plain.bytes());
  EXPECT_EQ(tight.packed_bytes(), 0u);
  EXPECT_EQ(tight.bytes(), plain.bytes());
  EXPECT_EQ(tight.layers()[0]->copies.size(), 1u);
}

TEST_F(TuningTest, WhatWasMeasuredIsReadTheNextTime) {
  const auto engine = ffn::Engine::create({}).value();
  const SliceStore store = load(Packing::kBeside, 1u << 30);
  TuneOptions options;
  options.cache_file = cache_;
  options.budget = std::chrono::milliseconds(300);
  const WorkerTuning first = tune_store(store, *engine, options).value().value();
  EXPECT_FALSE(first.cached);
  EXPECT_GT(first.tuning.fast[0], 0);
  EXPECT_GT(first.tuning.exact[0], 0);
  EXPECT_FALSE(first.lines.empty());
  const WorkerTuning second = tune_store(store, *engine, options).value().value();
  EXPECT_TRUE(second.cached);
  EXPECT_EQ(second.tuning.plans, first.tuning.plans);
  // Another number of threads is another machine.
  TuneOptions other = options;
  other.n_threads = 2;
  EXPECT_FALSE(tune_store(store, *engine, other).value().value().cached);
}

// A worker for class exact alone knows its speed from the start, too.
TEST_F(TuningTest, ExactAloneIsMeasuredWithoutPlans) {
  const auto engine = ffn::Engine::create({}).value();
  const SliceStore store = load(Packing::kNone);
  TuneOptions options;
  options.cache_file = cache_;
  options.fast = false;
  options.budget = std::chrono::milliseconds(200);
  const WorkerTuning first = tune_store(store, *engine, options).value().value();
  EXPECT_GT(first.tuning.exact[0], 0);
  EXPECT_EQ(first.tuning.fast[0], 0);
  EXPECT_TRUE(tune_store(store, *engine, options).value().value().cached);
  options.fast = true;
  EXPECT_FALSE(tune_store(store, *engine, options).value().value().cached) << "that file has no plans";
}

TEST_F(TuningTest, ADamagedCacheIsMeasuredAnew) {
  const auto engine = ffn::Engine::create({}).value();
  const SliceStore store = load(Packing::kNone);
  TuneOptions options;
  options.cache_file = cache_;
  options.budget = std::chrono::milliseconds(200);
  ASSERT_TRUE(tune_store(store, *engine, options));
  std::string line;
  std::getline(std::ifstream(cache_) >> std::ws, line);
  const std::string key = line.substr(0, line.find('\t'));
  for (const std::string& damaged : {key + "\t9 1 0 0 1 1", key + "\t", std::string("\x01\x02\n\n\t\t")}) {
    std::ofstream(cache_, std::ios::trunc) << damaged << '\n';
    const WorkerTuning again = tune_store(store, *engine, options).value().value();
    EXPECT_FALSE(again.cached) << damaged;
  }
  // A folder in its place costs the measurement only.
  TuneOptions folder = options;
  folder.cache_file = dir_ / "deep";
  EXPECT_TRUE(tune_store(store, *engine, folder).value());
}

TEST_F(TuningTest, ARearrangedWorkerTakesNoExactBackbone) {
  wire::Hello peer = testing::backbone_hello();
  EXPECT_FALSE(refuse_hello(peer, testing::our_numerics_id(), "", /*plain=*/true));
  const auto refusal = refuse_hello(peer, testing::our_numerics_id(), "", /*plain=*/false);
  ASSERT_TRUE(refusal);
  EXPECT_THAT(refusal->message, HasSubstr("--numerics fast"));
  peer.numerics = wire::Numerics::kFast;
  EXPECT_FALSE(refuse_hello(peer, testing::our_numerics_id(), "", /*plain=*/false));
}

}  // namespace
}  // namespace kvasir::worker
