#include "gguf/synth.h"

#include <sys/stat.h>

#include <cmath>
#include <set>

#include "ggml-backend.h"
#include "gguf/backbone.h"
#include "gguf/synth_blocks.h"
#include "gguf/test_support.h"
#include "llama.h"

namespace kvasir::gguf {
namespace {

constexpr std::array kTypes = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q8_0,   GGML_TYPE_Q4_0,
                               GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS, GGML_TYPE_MXFP4};

TEST(SynthBlocks, WeightsAreFiniteAndSpreadAsWanted) {
  constexpr std::size_t kElements = 256 * 1024;
  for (ggml_type type : kTypes) {
    ASSERT_TRUE(can_synthesize(type));
    Bytes blocks(static_cast<std::size_t>(*row_bytes(type, kElements)));
    for (float wanted : {1.0f, 0.02f, 0.003f}) {
      fill_random_weights(type, wanted, 42, blocks);
      std::vector<float> values(kElements);
      if (type == GGML_TYPE_F32) {
        std::memcpy(values.data(), blocks.data(), blocks.size());
      } else {
        ggml_get_type_traits(type)->to_float(blocks.data(), values.data(), kElements);
      }
      double sum = 0, squares = 0;
      for (float value : values) {
        ASSERT_TRUE(std::isfinite(value)) << ggml_type_name(type);
        sum += value;
        squares += double{value} * value;
      }
      const double deviation = std::sqrt(squares / kElements);
      EXPECT_GT(deviation, wanted / 1.5) << ggml_type_name(type);
      EXPECT_LT(deviation, wanted * 1.5) << ggml_type_name(type);
      EXPECT_LT(std::abs(sum / kElements), 0.12 * deviation) << ggml_type_name(type);
    }
    Bytes again(blocks.size()), other(blocks.size());
    fill_random_weights(type, 0.003f, 42, again);
    fill_random_weights(type, 0.003f, 43, other);
    EXPECT_EQ(again, blocks);
    EXPECT_NE(other, blocks);
  }
  EXPECT_FALSE(can_synthesize(GGML_TYPE_IQ1_S));
}

// Logits of the last of a few tokens, by an unmodified llama.cpp.
std::vector<float> logits_of(const std::string& path) {
  static const bool loaded = [] {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    ggml_backend_load_all();
    return true;
  }();
  EXPECT_TRUE(loaded);
  const std::unique_ptr<llama_model, decltype(&llama_model_free)> model(
      llama_model_load_from_file(path.c_str(), llama_model_default_params()), llama_model_free);
  if (!model) return {};
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 64;
  params.n_threads = params.n_threads_batch = 1;
  const std::unique_ptr<llama_context, decltype(&llama_free)> context(llama_init_from_model(model.get(), params),
                                                                      llama_free);
  if (!context) return {};
  const llama_vocab* vocab = llama_model_get_vocab(model.get());
  const std::string text = "Hello, the world: \xc3\xa9\n";
  std::vector<llama_token> tokens(64);
  const int n = llama_tokenize(vocab, text.data(), static_cast<int>(text.size()), tokens.data(), 64, false, false);
  EXPECT_GT(n, 0);
  std::string back;
  for (int i = 0; i < n; ++i) {
    std::array<char, 32> piece;
    const int size = llama_token_to_piece(vocab, tokens[static_cast<std::size_t>(i)], piece.data(), piece.size(), 0,
                                          false);
    EXPECT_GT(size, 0);
    back.append(piece.data(), static_cast<std::size_t>(size));
  }
  EXPECT_EQ(back, text);
  if (llama_decode(context.get(), llama_batch_get_one(tokens.data(), n)) != 0) return {};
  const float* logits = llama_get_logits_ith(context.get(), -1);
  return {logits, logits + llama_vocab_n_tokens(vocab)};
}

TEST(Synth, StockLlamaRunsEveryTypeAndEveryExpertCounts) {
  const TempDir dir;
  for (ggml_type type : kTypes) {
    SynthOptions options;
    options.gate = options.up = options.down = type;
    options.n_expert_used = 4;
    ASSERT_TRUE(write_synthetic(options, dir / "m.gguf"));
    const std::vector<float> logits = logits_of(dir / "m.gguf");
    ASSERT_EQ(logits.size(), 265u) << ggml_type_name(type);
    double squares = 0;
    for (float logit : logits) {
      ASSERT_TRUE(std::isfinite(logit)) << ggml_type_name(type);
      squares += double{logit} * logit;
    }
    EXPECT_GT(std::sqrt(squares / 265), 0.3) << ggml_type_name(type);
    EXPECT_LT(std::sqrt(squares / 265), 5.0) << ggml_type_name(type);

    // All experts of a layer differ, within the layer and between layers.
    const auto model = MoeModel::open(dir / "m.gguf");
    std::set<Bytes> slabs;
    for (const LayerExperts& layer : model->layers())
      for (std::uint32_t e = 0; e < 8; ++e) {
        const ExpertTensor& tensor = layer.tensors.front();
        Bytes slab(static_cast<std::size_t>(tensor.bytes_per_expert));
        ASSERT_TRUE(model->read_slab(tensor, e, slab));
        slabs.insert(std::move(slab));
      }
    EXPECT_EQ(slabs.size(), 16u);
  }
}

TEST(Synth, SharedExpertModelAndBackboneFileLoadToo) {
  const TempDir dir;
  SynthOptions options;
  options.architecture = "qwen2moe";
  options.n_ff_shared = 512;
  options.n_vocab = 512;
  ASSERT_TRUE(write_synthetic(options, dir / "m.gguf"));
  EXPECT_EQ(logits_of(dir / "m.gguf").size(), 512u);
  const auto model = MoeModel::open(dir / "m.gguf");
  ASSERT_TRUE(write_backbone(*model, dir / "b.gguf"));
  EXPECT_EQ(logits_of(dir / "b.gguf").size(), 512u);
}

TEST(Synth, TheSeedDecidesEveryByte) {
  const TempDir dir;
  SynthOptions options;
  ASSERT_TRUE(write_synthetic(options, dir / "a"));
  ASSERT_TRUE(write_synthetic(options, dir / "b"));
  EXPECT_EQ(read_file(dir / "a"), read_file(dir / "b"));
  options.seed = 2;
  ASSERT_TRUE(write_synthetic(options, dir / "b"));
  EXPECT_NE(read_file(dir / "a"), read_file(dir / "b"));
}

TEST(Synth, SparseModelTakesNoSpaceForExperts) {
  const TempDir dir;
  SynthOptions options;
  options.n_expert = 128;
  options.n_ff = 1024;
  options.n_layer = 8;
  options.sparse = true;
  ASSERT_TRUE(write_synthetic(options, dir / "m.gguf"));
  struct stat info {};
  ASSERT_EQ(::stat((dir / "m.gguf").c_str(), &info), 0);
  EXPECT_GT(info.st_size, 400'000'000);
  EXPECT_LT(info.st_blocks * 512, 8'000'000);
  EXPECT_TRUE(MoeModel::open(dir / "m.gguf"));
}

TEST(Synth, RefusesImpossibleGeometryInOneSentence) {
  const TempDir dir;
  const auto message = [&](auto change) {
    SynthOptions options;
    change(options);
    const std::string text = message_of(write_synthetic(options, dir / "m.gguf"));
    expect_one_sentence(text);
    return text;
  };
  using testing::HasSubstr;
  EXPECT_THAT(message([](SynthOptions& o) { o.architecture = "llama"; }), HasSubstr("choose qwen3moe or qwen2moe"));
  EXPECT_THAT(message([](SynthOptions& o) { o.n_layer = 0; }), HasSubstr("--layers is 0"));
  EXPECT_THAT(message([](SynthOptions& o) { o.n_expert = 5000; }), HasSubstr("--experts is 5000"));
  EXPECT_THAT(message([](SynthOptions& o) { o.n_expert_used = 9; }), HasSubstr("--top-k is 9; choose 1 to 8"));
  EXPECT_THAT(message([](SynthOptions& o) { o.n_embd = 100; }), HasSubstr("multiple of 64"));
  EXPECT_THAT(message([](SynthOptions& o) {
    o.n_ff = 300;
  }), HasSubstr("rows of 300 values, not a multiple of q6_K's block of 256"));
  EXPECT_THAT(message([](SynthOptions& o) { o.n_ff_shared = 8; }), HasSubstr("only qwen2moe"));
  EXPECT_THAT(message([](SynthOptions& o) { o.n_vocab = 10; }), HasSubstr("--vocab is 10"));
  EXPECT_THAT(message([](SynthOptions& o) { o.up = GGML_TYPE_IQ2_S; }), HasSubstr("cannot make random iq2_s weights"));
  EXPECT_EQ(dir.file_count(), 0u);

  SynthOptions options;
  EXPECT_TRUE(parse_synth_types("experts=q8_0,down=F16", options));
  EXPECT_EQ(options.gate, GGML_TYPE_Q8_0);
  EXPECT_EQ(options.down, GGML_TYPE_F16);
  for (const char* bad : {"gate", "gate=", "gate=Q9", "router=F32", ",", "gate=Q4_K,,"})
    EXPECT_FALSE(parse_synth_types(bad, options)) << bad;
}

}  // namespace
}  // namespace kvasir::gguf
