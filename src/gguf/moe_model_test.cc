#include "gguf/moe_model.h"

#include "gguf/test_support.h"

namespace kvasir::gguf {
namespace {

TEST(MoeModel, RealModel) {
  const auto model = MoeModel::open(real_model_path());
  ASSERT_TRUE(model) << message_of(model);
  EXPECT_EQ(model->kind(), FileKind::kModel);
  EXPECT_EQ(model->architecture(), "qwen2moe");
  EXPECT_EQ(model->model_name(), "tinymoe-en");
  EXPECT_EQ(model->n_layer(), 4u);
  EXPECT_EQ(model->n_expert(), 32u);
  EXPECT_EQ(model->n_expert_used(), 4u);
  EXPECT_EQ(model->n_embd(), 256u);
  ASSERT_EQ(model->layers().size(), 4u);
  const LayerExperts* layer = model->find(2, ExpertGroup::kExps);
  ASSERT_TRUE(layer);
  EXPECT_EQ(layer->held, ExpertSet::all(32));
  EXPECT_EQ(layer->tensors.size(), 3u);
  const ExpertTensor* down = layer->find(ExpertRole::kDown, ExpertPart::kWeight);
  ASSERT_TRUE(down);
  EXPECT_EQ(down->type, GGML_TYPE_Q6_K);
  EXPECT_EQ(down->bytes_per_expert, 53760u);
  EXPECT_EQ(layer->bytes_per_expert(), 53760u + 2 * 36864);

  const Bytes file = read_file(real_model_path());
  Bytes slab(static_cast<std::size_t>(down->bytes_per_expert));
  ASSERT_TRUE(model->read_slab(*down, 31, slab));
  const auto begin = file.begin() + static_cast<std::ptrdiff_t>(down->offset + 31 * down->bytes_per_expert);
  EXPECT_TRUE(std::equal(slab.begin(), slab.end(), begin));
  EXPECT_FALSE(model->find(4, ExpertGroup::kExps));
  EXPECT_FALSE(model->find(0, ExpertGroup::kChexps));
}

TEST(MoeModel, LayersMayDifferAndHaveTwoGroups) {
  const Bytes bytes = side_tensor_model();
  const MoeModel model = open_memory("m.gguf", bytes);
  ASSERT_EQ(model.layers().size(), 3u);
  EXPECT_EQ(model.n_expert(), 8u);
  const LayerExperts* exps = model.find(0, ExpertGroup::kExps);
  const LayerExperts* chexps = model.find(0, ExpertGroup::kChexps);
  const LayerExperts* merged = model.find(1, ExpertGroup::kExps);
  ASSERT_TRUE(exps && chexps && merged);
  EXPECT_EQ(exps->n_expert, 8u);
  EXPECT_EQ(chexps->n_expert, 4u);
  EXPECT_EQ(merged->n_expert, 6u);
  EXPECT_EQ(exps->tensors.size(), 8u);
  EXPECT_EQ(exps->find(ExpertRole::kUp, ExpertPart::kBias)->bytes_per_expert, 32u * 4);
  EXPECT_EQ(exps->find(ExpertRole::kDown, ExpertPart::kScale)->bytes_per_expert, 4u);
  const ExpertTensor* shared = exps->find(ExpertRole::kDown, ExpertPart::kInputScale);
  EXPECT_FALSE(shared->per_expert);
  EXPECT_EQ(slab_count(*exps, *shared), 1u);
  EXPECT_EQ(merged->tensors.size(), 2u);
}

TEST(MoeModel, DenseModelSaysSo) {
  TestModel dense("llama");
  dense.add("blk.0.ffn_up.weight", GGML_TYPE_F32, {8, 8, 1, 1});
  const Bytes bytes = dense.bytes();
  const MoeModel model = open_memory("dense.gguf", bytes);
  const Status status = model.require_experts();
  ASSERT_FALSE(status);
  EXPECT_THAT(status.error().message, testing::HasSubstr("dense model"));
  expect_one_sentence(status.error().message);
}

TEST(MoeModel, RefusesFilesThatContradictThemselves) {
  const auto open_with = [](auto change) {
    TestModel model;
    change(model);
    const Bytes bytes = model.bytes();
    auto files = ModelFiles::from_source(make_memory_source("m.gguf", bytes));
    if (!files) return message_of(files);
    const auto opened = MoeModel::from_files(*std::move(files));
    if (!opened) expect_one_sentence(opened.error().message);
    return message_of(opened);
  };
  using testing::HasSubstr;
  EXPECT_THAT(open_with([](TestModel& m) {
                m.add("blk.0.ffn_up_exps.weight", GGML_TYPE_F32, {8, 8, 4, 1});
                m.add("blk.0.ffn_down_exps.weight", GGML_TYPE_F32, {8, 8, 5, 1});
              }), HasSubstr("unlike the other weights"));
  EXPECT_THAT(open_with([](TestModel& m) {
    m.add("blk.0.ffn_up_exps.weight", GGML_TYPE_I8, {1, 1, kMaxExperts + 1, 1});
  }), HasSubstr("limit of"));
  EXPECT_THAT(open_with([](TestModel& m) {
    m.header().add_u32("kvasir.expert_shard.version", 2);
  }), HasSubstr("slice of format 2"));
  EXPECT_THAT(open_with([](TestModel& m) {
    m.header().add_u32("kvasir.backbone.version", 9);
  }), HasSubstr("backbone file of format 9"));
  const auto slice_with = [&](std::vector<std::uint32_t> ids, std::uint32_t count, const std::string& id) {
    return open_with([&](TestModel& m) {
      m.header().add_u32("kvasir.expert_shard.version", 1);
      m.header().add_u32_array("kvasir.expert_shard.experts.0", ids);
      m.header().add_u32("kvasir.expert_shard.expert_count.0", count);
      m.header().add_string("kvasir.expert_shard.layer_id.0.exps", id);
      m.add("blk.0.ffn_up_exps.weight", GGML_TYPE_F32, {8, 8, 2, 1});
    });
  };
  const std::string id(64, 'a');
  EXPECT_EQ(slice_with({3, 5}, 8, id), "no error");
  EXPECT_THAT(slice_with({3}, 8, id), HasSubstr("does not list 2 different experts"));
  EXPECT_THAT(slice_with({5, 3}, 8, id), HasSubstr("ascending"));
  EXPECT_THAT(slice_with({3, 3}, 8, id), HasSubstr("ascending"));
  EXPECT_THAT(slice_with({3, 8}, 8, id), HasSubstr("of 8"));
  EXPECT_THAT(slice_with({3, 5}, kMaxExperts + 1, id), HasSubstr("not valid"));
  EXPECT_THAT(slice_with({3, 5}, 8, "abc"), HasSubstr("64 hexadecimal digits"));
}

}  // namespace
}  // namespace kvasir::gguf
