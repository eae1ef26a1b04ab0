#include "worker/slice_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "gguf/moe_model.h"
#include "worker/testing.h"

namespace kvasir::worker {
namespace {

using ::testing::HasSubstr;
using testing::load;
using testing::make_model;
using testing::make_slice;

std::string refusal(const std::vector<std::string>& files, StoreOptions options = {}) {
  const auto store = SliceStore::load(files, options);
  return store ? "loaded" : store.error().message;
}

// Every held slab against the model file.
void expect_bytes_of(const HeldLayer& held, const gguf::MoeModel& model) {
  const gguf::LayerExperts* layer = model.find(held.layer, static_cast<gguf::ExpertGroup>(held.group));
  ASSERT_NE(layer, nullptr);
  const std::pair<const ggml_tensor*, gguf::ExpertRole> tensors[] = {{held.tensors.gate, gguf::ExpertRole::kGate},
                                                                     {held.tensors.up, gguf::ExpertRole::kUp},
                                                                     {held.tensors.down, gguf::ExpertRole::kDown}};
  for (const auto& [tensor, role] : tensors) {
    const gguf::ExpertTensor* source = layer->find(role, gguf::ExpertPart::kWeight);
    Bytes slab(source->bytes_per_expert);
    for (std::uint32_t expert : held.experts.ids()) {
      ASSERT_TRUE(model.read_slab(*source, expert, slab));
      const auto at = static_cast<std::size_t>(held.local_of[expert]) * slab.size();
      EXPECT_EQ(std::memcmp(static_cast<const char*>(tensor->data) + at, slab.data(), slab.size()), 0)
          << source->name << " expert " << expert;
    }
  }
}

class SliceStoreTest : public ::testing::Test {
 protected:
  void SetUp() override { make_model(model_, {}); }
  testing::TempDir dir_;
  const std::string model_ = dir_ / "model.gguf";
};

TEST_F(SliceStoreTest, JoinsSlicesOfOneModelAndServesWholeModels) {
  make_slice(model_, "0:2", "0,3,5", dir_ / "a.gguf");
  make_slice(model_, "1", "1:4", dir_ / "b.gguf");
  const gguf::MoeModel model = gguf::MoeModel::open(model_).value();
  const SliceStore store = load({dir_ / "a.gguf", dir_ / "b.gguf"});
  ASSERT_EQ(store.layers().size(), 2u);
  EXPECT_EQ(format_ranges(store.layers()[0]->experts), "0,3,5");
  EXPECT_EQ(format_ranges(store.layers()[1]->experts), "0:4,5");
  for (const HeldLayerPtr& layer : store.layers()) expect_bytes_of(*layer, model);

  const SliceStore whole = load({model_});
  ASSERT_EQ(whole.layers().size(), 2u);
  EXPECT_EQ(whole.layers()[0]->experts.size(), 8u);
  EXPECT_EQ(whole.layers()[0]->layer_id, store.layers()[0]->layer_id);
  EXPECT_NE(whole.layers()[0]->layer_id, whole.layers()[1]->layer_id);
  for (const HeldLayerPtr& layer : whole.layers()) expect_bytes_of(*layer, model);

  StoreOptions one;
  one.only_layer = 1;
  EXPECT_EQ(load({model_}, one).layers().size(), 1u);
  one.only_layer = 7;
  EXPECT_THAT(refusal({model_}, one), HasSubstr("holds no experts of layer 7"));
}

TEST_F(SliceStoreTest, KeepsTheSameLayerOfTwoModelsApart) {
  make_model(dir_ / "other.gguf", {.seed = 2});
  const SliceStore store = load({model_, dir_ / "other.gguf"});
  EXPECT_EQ(store.layers().size(), 4u);
  EXPECT_EQ(store.holdings().entries.size(), 4u);
  for (const HeldLayerPtr& layer : store.layers()) EXPECT_EQ(store.find(layer->layer_id), layer);
  EXPECT_EQ(store.find(wire::LayerId{}), nullptr);
}

TEST_F(SliceStoreTest, RefusesMoreThanItsMemoryBeforeLoading) {
  make_slice(model_, "0", "0:4", dir_ / "a.gguf");
  StoreOptions options;
  options.bytes_max = 4 * 3 * 256 * 256 / 256 * 144;  // four experts, three Q4_K matrices each
  EXPECT_EQ(load({dir_ / "a.gguf"}, options).bytes(), options.bytes_max);
  options.bytes_max -= 1;
  EXPECT_THAT(refusal({dir_ / "a.gguf"}, options), HasSubstr("are allowed"));
}

TEST_F(SliceStoreTest, RefusesADamagedSliceByTheExpert) {
  make_slice(model_, "0", "2:4", dir_ / "a.gguf");
  const gguf::MoeModel slice = gguf::MoeModel::open(dir_ / "a.gguf").value();
  const gguf::ExpertTensor& tensor = slice.layers()[0].tensors[0];
  std::fstream file(dir_ / "a.gguf", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(tensor.offset + tensor.bytes_per_expert + 100));  // in the second slab
  file.put('\x55').put('\x66');
  file.close();
  EXPECT_THAT(refusal({dir_ / "a.gguf"}), HasSubstr("expert 3 of " + tensor.name + " is damaged"));
  StoreOptions unchecked;
  unchecked.verify = false;
  EXPECT_EQ(refusal({dir_ / "a.gguf"}, unchecked), "loaded");
}

TEST_F(SliceStoreTest, NothingAtAllIsAnEmptyStore) {
  const SliceStore store = load({});
  EXPECT_TRUE(store.layers().empty());
  EXPECT_EQ(store.bytes(), 0u);
  EXPECT_TRUE(store.holdings().entries.empty());
}

TEST_F(SliceStoreTest, SaysWhichFileOrDeviceIsWrong) {
  EXPECT_THAT(refusal({dir_ / "absent.gguf"}), HasSubstr("absent.gguf"));
  StoreOptions options;
  options.device = "Abacus0";
  EXPECT_THAT(refusal({}, options), HasSubstr("Abacus0"));
}

}  // namespace
}  // namespace kvasir::worker
