#include "gguf/backbone.h"

#include <sys/stat.h>

#include "gguf/placeholder.h"
#include "gguf/slice.h"
#include "gguf/synth.h"
#include "gguf/test_support.h"
#include "gguf/verify.h"

namespace kvasir::gguf {
namespace {

TEST(Placeholder, GoldenBytesAndRefusals) {
  Placeholder placeholder{GGML_TYPE_Q4_K, {}, 0x0102030405060708};
  for (std::size_t i = 0; i < placeholder.layer_id.size(); ++i) placeholder.layer_id[i] = static_cast<std::byte>(i);
  const auto block = encode_placeholder(placeholder);
  EXPECT_EQ(to_hex(block),
            "4b56415349525048010000000c000000" "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
            "0807060504030201" "5039ff534d437d2c");
  EXPECT_EQ(decode_placeholder(block), placeholder);
  Bytes longer(block.begin(), block.end());
  longer.resize(4096);
  EXPECT_EQ(decode_placeholder(longer), placeholder);
  EXPECT_FALSE(decode_placeholder(ByteSpan(block).first(63)));
  for (std::size_t i = 0; i < block.size(); ++i) {
    auto damaged = block;
    damaged[i] ^= std::byte{1};
    EXPECT_FALSE(decode_placeholder(damaged)) << i;
  }
  EXPECT_FALSE(decode_placeholder(Bytes(64)));
}

TEST(Placeholder, TakesTheSmallestTypeThatFits) {
  EXPECT_EQ(placeholder_type({256, 256, 8, 1}), GGML_TYPE_Q1_0);
  const auto bytes = [](Shape ne) { return *tensor_bytes(*placeholder_type(ne), ne); };
  // A row of whole large blocks takes a small fraction; any row length has some type.
  EXPECT_LE(bytes({2048, 768, 128, 1}), 2048ull * 768 * 128 / 7);
  EXPECT_LE(bytes({96, 32, 8, 1}), 96ull * 32 * 8);
  EXPECT_LE(bytes({37, 32, 8, 1}), 37ull * 32 * 8 * 2);
  EXPECT_EQ(placeholder_type({1, 1, 1, 1}), std::nullopt);
}

TEST(Backbone, HoldsEverythingButTheExperts) {
  const TempDir dir;
  const auto model = MoeModel::open(real_model_path());
  ASSERT_TRUE(write_backbone(*model, dir / "b.gguf"));
  const auto backbone = MoeModel::open(dir / "b.gguf");
  ASSERT_TRUE(backbone) << message_of(backbone);
  EXPECT_EQ(backbone->kind(), FileKind::kBackbone);
  EXPECT_EQ(backbone->n_expert(), 32u);
  EXPECT_THAT(message_of(verify(*backbone, *model)), "no error");
  for (const LayerExperts& layer : model->layers()) {
    const LayerExperts* mine = backbone->find(layer.layer, layer.group);
    ASSERT_TRUE(mine);
    EXPECT_TRUE(mine->held.empty());
    EXPECT_EQ(*backbone->layer_id(*mine), *model->layer_id(layer));
    for (std::size_t i = 0; i < layer.tensors.size(); ++i) {
      EXPECT_EQ(mine->tensors[i].type, layer.tensors[i].type);
      EXPECT_EQ(mine->tensors[i].bytes_per_expert, layer.tensors[i].bytes_per_expert);
      std::array<std::byte, kPlaceholderBytes> block;
      ASSERT_TRUE(backbone->files().metadata().source().read_at(mine->tensors[i].offset, block));
      EXPECT_EQ(decode_placeholder(block), (Placeholder{layer.tensors[i].type, *model->layer_id(layer),
                                                        layer.tensors[i].nbytes}));
    }
  }
  // The vocabulary is there, and the experts take no space.
  const GgufFile& file = backbone->files().metadata();
  EXPECT_EQ(file.find("tokenizer.ggml.tokens")->count, 2048u);
  struct stat info {};
  ASSERT_EQ(::stat((dir / "b.gguf").c_str(), &info), 0);
  EXPECT_LT(info.st_blocks * 512, 2'200'000);
  // ggml's reader checks that offsets follow from types and shapes.
  gguf_context* context = gguf_init_from_file((dir / "b.gguf").c_str(), {true, nullptr});
  ASSERT_TRUE(context);
  gguf_free(context);

  for (const std::string& message : {message_of(SlicePlan::from_ranges(*backbone, ":", ":")),
                                     message_of(write_backbone(*backbone, dir / "c.gguf"))}) {
    EXPECT_THAT(message, testing::HasSubstr("is a backbone file"));
    expect_one_sentence(message);
  }
}

TEST(Backbone, KeepsSideTensorsAndFindsDamage) {
  const TempDir dir;
  const Bytes bytes = side_tensor_model();
  const MoeModel model = open_memory("m.gguf", bytes);
  ASSERT_TRUE(write_backbone(model, dir / "b.gguf"));
  const Bytes good = read_file(dir / "b.gguf");
  const MoeModel backbone = open_memory("b.gguf", good);
  EXPECT_THAT(message_of(verify(backbone, model)), "no error");
  const auto with_flip = [&](const char* tensor, std::size_t at) {
    Bytes bad = good;
    bad[static_cast<std::size_t>(backbone.files().metadata().find_tensor(tensor)->offset) + at] ^= std::byte{1};
    return message_of(verify(open_memory("b.gguf", bad), model));
  };
  EXPECT_THAT(with_flip("blk.0.ffn_up_exps.bias", 5), testing::HasSubstr("byte 5 of 'blk.0.ffn_up_exps.bias' differs"));
  EXPECT_THAT(with_flip("blk.1.ffn_down_exps.weight", 20),
              testing::HasSubstr("placeholder of 'blk.1.ffn_down_exps.weight'"));
}

}  // namespace
}  // namespace kvasir::gguf
