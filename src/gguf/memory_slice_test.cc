#include "gguf/memory_slice.h"

#include <deque>

#include "gguf/test_support.h"

namespace kvasir::gguf {
namespace {

// Layer 0, group exps of the model with side tensors, its tensors copied into memory.
class MemorySlice : public ::testing::Test {
 protected:
  void SetUp() override {
    const LayerExperts* layer = model_.find(0, ExpertGroup::kExps);
    ASSERT_NE(layer, nullptr);
    for (const ExpertTensor& tensor : layer->tensors) {
      if (!tensor.per_expert) continue;  // the shared scalar is no part of an expert
      Bytes& bytes = data_.emplace_back(tensor.nbytes);
      const std::uint64_t slab = tensor.bytes_per_expert;
      for (std::uint32_t e = 0; e < kExperts; ++e)
        ASSERT_TRUE(model_.read_slab(tensor, e, std::span(bytes).subspan(e * slab, slab)));
      tensors_.push_back({tensor.name, tensor.type, tensor.ne, bytes.data()});
    }
    ASSERT_EQ(tensors_.size(), 7u);
    id_.fill(std::byte{0x5a});
  }
  MemoryLayer layer() const {
    return {.id = id_, .model_name = "a model", .n_embd = 64, .n_expert = kExperts, .tensors = tensors_};
  }

  static constexpr std::uint32_t kExperts = 8;
  const Bytes file_ = side_tensor_model();
  const MoeModel model_ = open_memory("m.gguf", file_);
  std::deque<Bytes> data_;
  std::vector<MemoryTensor> tensors_;
  LayerId id_{};
};

TEST_F(MemorySlice, IsASliceWithTheModelsBytes) {
  const ExpertSet kept = ExpertSet::from_ids({1, 2, 3, 6});
  const auto bytes = make_memory_slice(layer(), kept);
  ASSERT_TRUE(bytes) << message_of(bytes);
  const MoeModel slice = open_memory("uploaded", *bytes);
  EXPECT_EQ(slice.kind(), FileKind::kSlice);
  EXPECT_EQ(slice.model_name(), "a model");
  ASSERT_EQ(slice.layers().size(), 1u);
  const LayerExperts& got = slice.layers().front();
  EXPECT_EQ(got.layer, 0u);
  EXPECT_EQ(got.n_expert, kExperts);
  EXPECT_EQ(got.held, kept);
  EXPECT_EQ(*slice.layer_id(got), id_);
  ASSERT_EQ(got.tensors.size(), tensors_.size());
  for (const ExpertTensor& tensor : got.tensors) {
    ASSERT_TRUE(tensor.per_expert) << tensor.name;
    const ExpertTensor* source = model_.find(0, ExpertGroup::kExps)->find(tensor.id.role, tensor.id.part);
    ASSERT_EQ(tensor.bytes_per_expert, source->bytes_per_expert);
    const auto hashes = slice.slab_hashes(tensor);
    ASSERT_TRUE(hashes) << message_of(hashes);
    Bytes want(tensor.bytes_per_expert), have(tensor.bytes_per_expert);
    std::uint32_t slab = 0;
    for (const std::uint32_t expert : kept.ids()) {
      ASSERT_TRUE(model_.read_slab(*source, expert, want));
      ASSERT_TRUE(slice.read_slab(tensor, slab, have));
      EXPECT_EQ(want, have) << tensor.name << ' ' << expert;
      Blake3 hasher;
      hasher.update(have);
      EXPECT_EQ(hasher.finish(), (*hashes)[slab++]);
    }
  }
}

TEST_F(MemorySlice, CostCoversEverySlice) {
  const auto cost = memory_slice_cost(layer());
  ASSERT_TRUE(cost) << message_of(cost);
  for (std::uint32_t n = 1; n <= kExperts; ++n) {
    const auto bytes = make_memory_slice(layer(), ExpertSet::all(n));
    ASSERT_TRUE(bytes);
    EXPECT_LE(bytes->size(), cost->fixed_bytes + n * cost->bytes_per_expert);
    EXPECT_GT(bytes->size(), n * cost->bytes_per_expert);  // and is not far over it
  }
}

TEST_F(MemorySlice, RefusesWhatIsNoLayer) {
  const auto refusal = [&](const MemoryLayer& bad, const ExpertSet& kept = ExpertSet::all(2)) {
    const auto made = make_memory_slice(bad, kept);
    EXPECT_FALSE(made);
    expect_one_sentence(message_of(made));
    return message_of(made);
  };
  EXPECT_THAT(refusal(layer(), ExpertSet{}), ::testing::HasSubstr("not experts"));
  EXPECT_THAT(refusal(layer(), ExpertSet::all(9)), ::testing::HasSubstr("layer of 8"));
  MemoryLayer none = layer();
  none.tensors = {};
  EXPECT_THAT(refusal(none), ::testing::HasSubstr("without weights"));
  MemoryLayer counts = layer();
  counts.n_expert = 7;
  EXPECT_THAT(refusal(counts), ::testing::HasSubstr("each of 7"));
  std::vector<MemoryTensor> changed = tensors_;
  MemoryLayer mixed = layer();
  mixed.tensors = changed;
  changed[0].name = "blk.1" + tensors_[0].name.substr(5);
  EXPECT_THAT(refusal(mixed), ::testing::HasSubstr("one layer"));
  changed[0].name = "blk.0.ffn_norm_exps.weight";
  EXPECT_THAT(refusal(mixed), ::testing::HasSubstr("not one of routed experts"));
}

}  // namespace
}  // namespace kvasir::gguf
