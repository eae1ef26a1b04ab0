// The oracle's checks on synthetic models: what they measure, and that they can fail.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "ffn/device.h"
#include "ffn/engine.h"
#include "gguf/slice.h"
#include "gguf/synth.h"
#include "verify/agreement.h"
#include "verify/experts.h"
#include "verify/recipes.h"
#include "verify/sharding.h"

namespace kvasir::verify {
namespace {

namespace fs = std::filesystem;

class VerifyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "kvasir-verify-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    const gguf::SynthOptions options{.n_layer = 2, .n_expert = 10, .n_expert_used = 3, .n_embd = 256, .n_ff = 256};
    ASSERT_TRUE(gguf::write_synthetic(options, model_path()));
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string model_path() const { return (folder_ / "model.gguf").string(); }
  gguf::MoeModel open(const std::string& path) const { return gguf::MoeModel::open(path).value(); }

  static ExpertsOptions gaussian(const gguf::MoeModel& model) {
    ExpertsOptions options;
    options.rows_of = [&model](const gguf::LayerExperts& layer, const wire::LayerId&) -> Result<std::optional<LayerRows>> {
      KVASIR_ASSIGN(const wire::Recipe recipe, recipe_from_file(model, layer));
      return random_rows(recipe, 8, 3);
    };
    return options;
  }

  fs::path folder_;
};

TEST(Agreement, FiguresOfAKnownPair) {
  const double truth[] = {3, 4, 0};
  const float value[] = {3, 4, 1};
  Agreement agreement;
  agreement.add(truth, std::span<const float>(value));
  EXPECT_DOUBLE_EQ(agreement.cosine(), 25 / (5 * std::sqrt(26.0)));
  EXPECT_DOUBLE_EQ(agreement.max_abs(), 1);
  EXPECT_DOUBLE_EQ(agreement.max_relative(), 0.25);
  EXPECT_TRUE(agreement.all_close(1));
  EXPECT_FALSE(agreement.all_close(0.99));
  const float broken[] = {3, NAN, 0};
  agreement.add(truth, std::span<const float>(broken));
  EXPECT_EQ(agreement.cosine(), 0);
  EXPECT_FALSE(agreement.all_close(1e9));
}

TEST(Agreement, TheGateAllowsHalfAgainTheReferencesDistance) {
  EXPECT_TRUE(passes_gate(1 - 1.4e-4, 1 - 1e-4));
  EXPECT_FALSE(passes_gate(1 - 1.6e-4, 1 - 1e-4));
  EXPECT_TRUE(passes_gate(1 - 0.9e-6, 1));
}

TEST_F(VerifyTest, ShardsGiveTheSumOfTheWhole) {
  const gguf::MoeModel model = open(model_path());
  for (std::uint32_t n_shards : {1u, 3u, 10u, 25u}) {
    const Shards shards = cut_shards(model, n_shards).value();
    if (n_shards <= 3) {
      EXPECT_EQ(shards.models.size(), n_shards);
    }
    const auto layers = check_sharding(model, shards.models, {});
    ASSERT_TRUE(layers) << layers.error().message;
    ASSERT_EQ(layers->size(), 2u);
    for (const ShardingLayer& layer : *layers) {
      EXPECT_EQ(layer.n_touched, 10u);
      EXPECT_EQ(layer.per_pair.max_abs(), 0) << n_shards;
      EXPECT_GT(layer.per_pair.n_values(), 0u);
      EXPECT_LE(layer.partial.max_abs(), kShardingAbsMax);
      EXPECT_TRUE(layer.passes());
    }
  }
}

TEST_F(VerifyTest, AShardOfAnotherModelIsFound) {
  gguf::SynthOptions other{.n_layer = 2, .n_expert = 10, .n_expert_used = 3, .n_embd = 256, .n_ff = 256, .seed = 2};
  const std::string path = (folder_ / "other.gguf").string();
  ASSERT_TRUE(gguf::write_synthetic(other, path));
  const gguf::MoeModel model = open(model_path()), wrong = open(path);
  const Shards shards = cut_shards(wrong, 3).value();
  for (const ShardingLayer& layer : check_sharding(model, shards.models, {}).value()) EXPECT_FALSE(layer.passes());
}

TEST_F(VerifyTest, ASliceIsCheckedLikeAModel) {
  const gguf::MoeModel model = open(model_path());
  const std::string path = (folder_ / "slice.gguf").string();
  gguf::SlicePlan plan;
  plan.layers[1] = ExpertSet::from_ids({2, 3, 7, 9});
  ASSERT_TRUE(gguf::write_slice(gguf::SliceLayout::make(model, plan).value(), path));
  const gguf::MoeModel slice = open(path);
  const Shards shards = cut_shards(slice, 3).value();
  const auto layers = check_sharding(slice, shards.models, {.n_used = 2}).value();
  ASSERT_EQ(layers.size(), 1u);
  EXPECT_EQ(layers[0].n_touched, 4u);
  EXPECT_TRUE(layers[0].passes());
  // And the slice as the one shard of the model it was cut from.
  const auto against = check_sharding(model, std::span(&slice, 1), {.n_used = 2}).value();
  ASSERT_EQ(against.size(), 1u);
  EXPECT_EQ(against[0].layer, 1u);
  EXPECT_EQ(against[0].per_pair.max_abs(), 0);
}

TEST_F(VerifyTest, TheCpuIsItsOwnReference) {
  const gguf::MoeModel model = open(model_path());
  const auto subject = make_device_subject(model, "CPU", 2).value();
  const auto layers = check_experts(model, *subject, gaussian(model)).value();
  ASSERT_EQ(layers.size(), 2u);
  for (const LayerVerdict& layer : layers) {
    EXPECT_EQ(layer.n_experts, 10u);
    EXPECT_TRUE(layer.passes());
    EXPECT_EQ(layer.subject.cosine(), layer.reference.cosine());
    EXPECT_GT(layer.subject.cosine(), 0.999);
    EXPECT_LT(layer.subject.cosine(), 1);  // quantised rows: an oracle equal to ggml would be ggml
  }
}

// A subject over a model of its own, in which one slab was altered.
TEST_F(VerifyTest, OneAlteredSlabIsNamed) {
  const std::string altered_path = (folder_ / "altered.gguf").string();
  fs::copy_file(model_path(), altered_path);
  {
    const gguf::MoeModel model = open(model_path());
    const gguf::ExpertTensor& down = *model.layers()[1].find(gguf::ExpertRole::kDown, gguf::ExpertPart::kWeight);
    std::fstream file(altered_path, std::ios::in | std::ios::out | std::ios::binary);
    // One quant byte in the middle of expert 6.
    file.seekg(static_cast<std::streamoff>(down.offset + 6 * down.bytes_per_expert + 21 * 1000));
    const int byte = file.get();
    file.seekp(static_cast<std::streamoff>(down.offset + 6 * down.bytes_per_expert + 21 * 1000));
    file.put(static_cast<char>(byte ^ 0x5a));
  }
  const gguf::MoeModel model = open(model_path()), altered = open(altered_path);
  const auto subject = make_device_subject(altered, "CPU", 1).value();
  const auto layers = check_experts(model, *subject, gaussian(model)).value();
  EXPECT_TRUE(layers[0].passes());
  ASSERT_EQ(layers[1].bad.size(), 1u);
  EXPECT_EQ(layers[1].bad[0].expert, 6u);
  EXPECT_EQ(layers[1].bad[0].fault, ExpertFault::kBits);
  EXPECT_FALSE(layers[1].passes());
}

}  // namespace
}  // namespace kvasir::verify
