#include "gguf/layer_id.h"

#include "base/hex.h"
#include "gguf/test_support.h"

namespace kvasir::gguf {
namespace {

// Two weights of 7 experts; slabs of 34 and 8192 + 64 bytes.
struct Fixture {
  Bytes small = Bytes(34 * 7), large = Bytes(8256 * 7);
  Fixture() {
    for (std::size_t i = 0; i < small.size(); ++i) small[i] = static_cast<std::byte>(i * 5);
    for (std::size_t i = 0; i < large.size(); ++i) large[i] = static_cast<std::byte>(i * 7 + i / 256);
  }
  std::vector<LayerIdMemoryTensor> tensors() const {
    return {{"blk.2.ffn_down_exps.weight", GGML_TYPE_Q8_0, {32, 1, 7}, small.data()},
            {"blk.2.ffn_up_exps.weight", GGML_TYPE_F32, {2064, 1, 7}, large.data()}};
  }
  LayerId id() const { return *compute_layer_id(tensors()); }
};

TEST(LayerId, IsWhatTheFormatSays) {
  const Fixture fixture;
  // Written out again from the description in the header.
  Blake3 hash;
  const auto number = [&](auto value) { hash.update(std::as_bytes(std::span(&value, 1))); };
  const auto text = [&](std::string_view s) { hash.update(std::as_bytes(std::span(s))); };
  text("kvasir expert layer v1\n");
  for (const auto& tensor : fixture.tensors()) {
    number(static_cast<std::uint32_t>(tensor.name.size()));
    text(tensor.name);
    number(static_cast<std::uint32_t>(tensor.type));
    for (std::uint64_t n : tensor.ne) number(n);
    const std::size_t slab = tensor.type == GGML_TYPE_F32 ? 8256 : 34;
    const std::size_t sample = std::min<std::size_t>(4096, slab);
    for (std::uint32_t e : {0u, 2u, 4u, 6u}) {
      number(e);
      hash.update({tensor.data + e * slab, sample});
      hash.update({tensor.data + (e + 1) * slab - sample, sample});
    }
  }
  EXPECT_EQ(to_hex(hash.finish()), to_hex(fixture.id()));
  // Recorded in files: must never change for version 1.
  EXPECT_EQ(to_hex(fixture.id()), "8c1369ecef19999b0e909bc9f6ed9dd418e720488f4fc8f3c9589d55528a8a5d");
}

TEST(LayerId, DependsOnEverySampledThingAndNotOnOrder) {
  const Fixture fixture;
  auto tensors = fixture.tensors();
  std::swap(tensors[0], tensors[1]);
  EXPECT_EQ(*compute_layer_id(tensors), fixture.id());

  const auto changed = [&](auto change) {
    auto copy = fixture.tensors();
    change(copy);
    return *compute_layer_id(copy) != fixture.id();
  };
  EXPECT_TRUE(changed([](auto& t) { t[0].name = "blk.3.ffn_down_exps.weight"; }));
  EXPECT_TRUE(changed([](auto& t) { t[1].type = GGML_TYPE_I32; }));
  EXPECT_TRUE(changed([](auto& t) { t[1].ne = {1032, 2, 7}; }));
  EXPECT_TRUE(changed([](auto& t) { t.pop_back(); }));

  for (const auto& [at, sampled] : {std::pair<std::size_t, bool>{0, true}, {4095, true}, {4096, false}, {4159, false},
                                    {4160, true}, {8255, true}, {8256, false}, {2 * 8256, true}, {5 * 8256, false},
                                    {7 * 8256 - 1, true}}) {
    Fixture other;
    other.large[at] ^= std::byte{1};
    EXPECT_EQ(other.id() != fixture.id(), sampled) << at;
  }
}

TEST(LayerId, FewExpertsAreSampledOnce) {
  const Bytes data(34 * 2, std::byte{3});
  for (std::uint64_t n : {1u, 2u}) {
    const std::vector<LayerIdMemoryTensor> tensors{{"w", GGML_TYPE_Q8_0, {32, 1, n}, data.data()}};
    EXPECT_TRUE(compute_layer_id(tensors));
  }
  const std::vector<LayerIdMemoryTensor> none{{"w", GGML_TYPE_Q8_0, {32, 1, 0}, data.data()}};
  EXPECT_FALSE(compute_layer_id(none));
  const std::vector<LayerIdMemoryTensor> uneven{{"w", GGML_TYPE_Q8_0, {33, 1, 1}, data.data()}};
  EXPECT_FALSE(compute_layer_id(uneven));
}

TEST(LayerId, SameFromFileAndMemoryAndDifferentByLayer) {
  const auto model = MoeModel::open(real_model_path());
  ASSERT_TRUE(model) << message_of(model);
  const Bytes file = read_file(real_model_path());
  std::vector<LayerId> seen;
  for (const LayerExperts& layer : model->layers()) {
    std::vector<LayerIdMemoryTensor> tensors;
    for (const ExpertTensor& tensor : layer.tensors)
      tensors.push_back({tensor.name, tensor.type, {tensor.ne[0], tensor.ne[1], tensor.ne[2]},
                         file.data() + tensor.offset});
    const auto id = model->layer_id(layer);
    ASSERT_TRUE(id) << message_of(id);
    EXPECT_EQ(*id, *compute_layer_id(tensors));
    EXPECT_EQ(std::ranges::count(seen, *id), 0);
    seen.push_back(*id);
  }
  EXPECT_EQ(seen.size(), 4u);
}

}  // namespace
}  // namespace kvasir::gguf
