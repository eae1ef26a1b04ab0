#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "wire/codec.h"
#include "wire/text.h"

namespace kvasir::wire {
namespace {

// --- text ------------------------------------------------------------------------------

TEST(Text, PlainAndNot) {
  for (const char* text : {"", "kvasir 0.1.0", "modèle", "模型", "\xf0\x9f\x90\x8d", "\xc2\xa0"})
    EXPECT_TRUE(is_plain_text(text)) << text;
  for (const char* text : {"\n", "a\x1b[2J", "\x7f", "\x80", "\xc2", "\xc0\xaf", "\xc2\x9b", "\xe0\x80\xaf",
                           "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xff"})
    EXPECT_FALSE(is_plain_text(text)) << text;
  EXPECT_FALSE(is_plain_text(std::string_view("a\0b", 3)));
}

TEST(Text, EncodingMakesAnyTextPlain) {
  const ErrorMessage error{ErrorCode::kInternal, "line one\nmodèle\xff" + std::string(5000, 'x')};
  const ErrorMessage got = *decode_error(encode(error));
  EXPECT_EQ(got.message.size(), kTextBytesMax);
  EXPECT_TRUE(got.message.starts_with("line one?modèle?xxx"));
  // A character cut by the limit is replaced too.
  EXPECT_TRUE(decode_error(encode(ErrorMessage{ErrorCode::kBusy, std::string(kTextBytesMax - 1, 'x') + "é"})));
}

// --- small messages ----------------------------------------------------------------------

TEST(Messages, UnknownErrorCodesAreUnknown) {
  Bytes payload = encode(ErrorMessage{ErrorCode::kInternal, "x"});
  for (unsigned code : {15u, 255u, 65535u}) {
    store_le(payload.data(), static_cast<std::uint16_t>(code));
    EXPECT_EQ(decode_error(payload)->code, ErrorCode::kUnknown);
  }
}

TEST(Messages, UnknownHelloEnumsAreRefused) {
  Hello hello;
  hello.software = "s";
  hello.token = "t";
  const Bytes good = encode(hello);
  ASSERT_TRUE(decode_hello(good));
  for (const auto& [at, value] : {std::pair{2, 0}, {2, 3}, {2, 255}, {3, 3}, {3, 255}}) {
    Bytes bad = good;
    bad[static_cast<std::size_t>(at)] = static_cast<std::byte>(value);
    EXPECT_FALSE(decode_hello(bad)) << at << ' ' << value;
  }
}

TEST(Messages, HelloOfAnotherVersionStillDecodes) {
  // The check of versions is the receiver's, so that it can answer with kWrongVersion.
  Hello hello;
  hello.protocol_version = 9;
  EXPECT_EQ(decode_hello(encode(hello))->protocol_version, 9);
}

Holding holding(ExpertSet experts) {
  return {.layer = 3, .group = ExpertGroup::kExps, .n_expert = 256, .n_embd = 3072, .experts = std::move(experts)};
}

TEST(Holdings, RangesMustBeCanonical) {
  ExpertSet two;
  two.add({0, 16});
  two.add({20, 21});
  const Bytes good = encode(Holdings{{holding(two)}});
  ASSERT_EQ(good.size(), kHoldingsFixedBytes + kHoldingFixedBytes + 2 * kRangeBytes);
  EXPECT_EQ(decode_holdings(good)->entries[0].experts, two);
  constexpr std::size_t kFirstRange = kHoldingsFixedBytes + kHoldingFixedBytes;
  const auto with = [&](std::uint32_t b0, std::uint32_t e0, std::uint32_t b1, std::uint32_t e1) {
    Bytes bad = good;
    store_le(bad.data() + kFirstRange, b0);
    store_le(bad.data() + kFirstRange + 4, e0);
    store_le(bad.data() + kFirstRange + 8, b1);
    store_le(bad.data() + kFirstRange + 12, e1);
    return decode_holdings(bad).has_value();
  };
  EXPECT_TRUE(with(0, 1, 2, 256));
  EXPECT_FALSE(with(0, 0, 2, 3));      // empty
  EXPECT_FALSE(with(5, 4, 6, 7));      // reversed
  EXPECT_FALSE(with(0, 16, 16, 17));   // touching: should be one
  EXPECT_FALSE(with(0, 16, 8, 20));    // overlapping
  EXPECT_FALSE(with(20, 21, 0, 16));   // unordered
  EXPECT_FALSE(with(0, 16, 20, 257));  // past n_expert
}

TEST(Holdings, CountsAreBounded) {
  // A few bytes that claim many entries or ranges are refused before anything is allocated.
  Bytes claim;
  ByteWriter(claim).put(std::uint64_t{0});
  ByteWriter(claim).put(kHoldingsMax);
  EXPECT_FALSE(decode_holdings(claim));
  store_le(claim.data() + 8, UINT32_MAX);
  EXPECT_FALSE(decode_holdings(claim));

  Holdings none{{holding({})}};
  EXPECT_EQ(*decode_holdings(encode(none)), none);
  Bytes ranges = encode(none);
  store_le(ranges.data() + kHoldingsFixedBytes + kHoldingFixedBytes - 4, kRangesMax);
  EXPECT_FALSE(decode_holdings(ranges));

  // 17 entries of 4096 ranges pass each single limit and break the common one.
  ExpertSet comb;
  for (std::uint32_t i = 0; i < kRangesMax; ++i) comb.add({2 * i, 2 * i + 1});
  Holding entry = holding(std::move(comb));
  entry.n_expert = kExpertsMax;
  Holdings many{std::vector<Holding>(16, entry)};
  EXPECT_EQ(*decode_holdings(encode(many)), many);
  many.entries.push_back(entry);
  EXPECT_FALSE(decode_holdings(encode(many)));
}

// --- recipes ------------------------------------------------------------------------------

Recipe swiglu() { return {.n_embd = 64, .n_ff = 32, .n_expert = 8}; }

bool survives(const Recipe& recipe) {
  const LayerRecipe message{.recipe_id = 1, .recipe = recipe};
  const auto got = decode_layer_recipe(encode(message));
  EXPECT_EQ(got.has_value(), validate(recipe).has_value());
  if (got) {
    EXPECT_EQ(*got, message);
  }
  return got.has_value();
}

template <typename Change>
bool survives_with(Change change) {
  Recipe recipe = swiglu();
  change(recipe);
  return survives(recipe);
}

TEST(Holdings, RoomForUploadsIsBounded) {
  Holdings holdings{.entries = {}, .upload_bytes_free = kUploadBytesMax};
  EXPECT_EQ(*decode_holdings(encode(holdings)), holdings);
  ++holdings.upload_bytes_free;
  EXPECT_FALSE(decode_holdings(encode(holdings)));
}

TEST(Upload, PartsLieInsideTheSlice) {
  const Bytes bytes(8, std::byte{7});
  const auto payload = [&](std::uint64_t total, std::uint64_t offset, std::uint32_t n_bytes, std::uint32_t reserved = 0) {
    Bytes out;
    ByteWriter writer(out);
    writer.put(total);
    writer.put(offset);
    writer.put(n_bytes);
    writer.put(reserved);
    writer.put_bytes(bytes);
    return out;
  };
  const auto good = decode_upload(payload(100, 92, 8));
  ASSERT_TRUE(good);
  EXPECT_EQ(good->head, (UploadHead{.total_bytes = 100, .offset = 92}));
  EXPECT_EQ(good->bytes.size(), 8u);
  EXPECT_TRUE(decode_upload(payload(kUploadBytesMax, 0, 8)));
  EXPECT_FALSE(decode_upload(payload(kUploadBytesMax + 1, 0, 8)));
  EXPECT_FALSE(decode_upload(payload(100, 93, 8)));         // past its end
  EXPECT_FALSE(decode_upload(payload(100, UINT64_MAX, 8)));  // the sum wraps
  EXPECT_FALSE(decode_upload(payload(100, 0, 7)));
  EXPECT_FALSE(decode_upload(payload(100, 0, 9)));
  EXPECT_FALSE(decode_upload(payload(100, 0, 8, 1)));
  EXPECT_FALSE(decode_upload(ByteSpan(payload(100, 0, 0)).first(kUploadHeadBytes)));  // empty

  Bytes large;
  ByteWriter writer(large);
  writer.put(kUploadBytesMax);
  writer.put(std::uint64_t{0});
  writer.put(kUploadChunkBytes + 1);
  writer.put(std::uint32_t{0});
  large.resize(large.size() + kUploadChunkBytes + 1);
  EXPECT_FALSE(decode_upload(large));
}

TEST(Recipe, ActivationMustFitTheGate) {
  for (unsigned layout = 0; layout < 4; ++layout)
    for (unsigned activation = 0; activation < 24; ++activation) {
      const bool gated = activation <= 8;
      const bool ungated = activation >= 16 && activation <= 21;
      const bool split_only = activation == 8;
      const bool fits = (gated && (layout == 1 || (layout == 2 && !split_only))) || (ungated && layout == 0);
      EXPECT_EQ(survives_with([&](Recipe& r) {
                  r.gate_layout = static_cast<GateLayout>(layout);
                  r.activation = static_cast<Activation>(activation);
                }),
                fits)
          << layout << ' ' << activation;
    }
}

TEST(Recipe, PartsOfAPathNeedThePath) {
  EXPECT_TRUE(survives_with([](Recipe& r) { r.gate_scale = r.gate_bias = r.clamp_gate.enabled = true; }));
  const auto merged = [](auto change) {
    return survives_with([&](Recipe& r) {
      r.gate_layout = GateLayout::kMerged;
      change(r);
    });
  };
  EXPECT_TRUE(merged([](Recipe& r) { r.up_scale = r.up_bias = r.clamp_gate.enabled = true; }));
  EXPECT_FALSE(merged([](Recipe& r) { r.gate_scale = true; }));
  EXPECT_FALSE(merged([](Recipe& r) { r.gate_bias = true; }));
  EXPECT_FALSE(survives_with([](Recipe& r) {
    r.gate_layout = GateLayout::kNone;
    r.activation = Activation::kRelu;
    r.clamp_gate.enabled = true;
  }));
  EXPECT_FALSE(survives_with([](Recipe& r) { r.clamp_gate_activated.enabled = true; }));
  EXPECT_TRUE(survives_with([](Recipe& r) {
    r.activation = Activation::kSiluMul;
    r.clamp_gate_activated = {true, -INFINITY, 7};
  }));
}

TEST(Recipe, NumbersMustBeSound) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const auto clamp = [](float min, float max) {
    return survives_with([&](Recipe& r) { r.clamp_up = {true, min, max}; });
  };
  EXPECT_TRUE(clamp(-7, 7));
  EXPECT_TRUE(clamp(-INFINITY, 7));
  EXPECT_TRUE(clamp(0, INFINITY));
  EXPECT_FALSE(clamp(7, -7));
  EXPECT_FALSE(clamp(kNan, 7));
  EXPECT_FALSE(clamp(-7, kNan));
  EXPECT_FALSE(clamp(INFINITY, INFINITY));
  EXPECT_FALSE(clamp(-INFINITY, -INFINITY));
  const auto oai = [](float alpha, float limit) {
    return survives_with([&](Recipe& r) {
      r.activation = Activation::kSwigluOai;
      r.alpha = alpha;
      r.limit = limit;
    });
  };
  EXPECT_TRUE(oai(1.702f, 7));
  EXPECT_FALSE(oai(kNan, 7));
  EXPECT_FALSE(oai(1, INFINITY));
  const auto clamped_swiglu = [](float alpha, float limit) {
    return survives_with([&](Recipe& r) {
      r.activation = Activation::kSwigluClamp;
      r.alpha = alpha;
      r.limit = limit;
    });
  };
  EXPECT_TRUE(clamped_swiglu(0, 7));
  EXPECT_FALSE(clamped_swiglu(0, kNan));
  EXPECT_FALSE(clamped_swiglu(1, 7));  // alpha is not its constant
  const auto capped = [](SoftCap gate, SoftCap up) {
    return survives_with([&](Recipe& r) {
      r.activation = Activation::kSoftCapSiluMul;
      r.cap_gate = gate;
      r.cap_up = up;
    });
  };
  EXPECT_TRUE(capped({0.1f, 10}, {0.05f, 20}));
  EXPECT_FALSE(capped({kNan, 10}, {0.05f, 20}));
  EXPECT_FALSE(capped({0.1f, 10}, {0.05f, INFINITY}));
  EXPECT_FALSE(survives_with([](Recipe& r) { r.cap_up.in = 1; }));
  for (auto field : {&Recipe::n_embd, &Recipe::n_ff, &Recipe::n_expert})
    for (std::uint32_t bad : {0u, kWidthMax + 1, UINT32_MAX})
      EXPECT_FALSE(survives_with([&](Recipe& r) { r.*field = bad; }));
  EXPECT_FALSE(survives_with([](Recipe& r) { r.n_expert = kExpertsMax + 1; }));
  EXPECT_FALSE(survives_with([](Recipe& r) { r.group = static_cast<ExpertGroup>(2); }));
}

TEST(Recipe, OneByteFormPerRecipe) {
  const Bytes good = encode(LayerRecipe{.recipe = swiglu()});
  ASSERT_EQ(good.size(), kLayerRecipeBytes);
  for (const auto& [at, value] : {std::pair{39, 1},
                                  {41, 2},
                                  {41, 0xff},
                                  {42, 1},
                                  {43, 1},
                                  {47, 1},
                                  {51, 1},
                                  {55, 1},
                                  {59, 1},
                                  {63, 1},
                                  {67, 1},
                                  {71, 1},
                                  {91, 1}}) {
    Bytes bad = good;
    bad[static_cast<std::size_t>(at)] = static_cast<std::byte>(value);
    EXPECT_FALSE(decode_layer_recipe(bad)) << at;
  }
  // What a recipe does not use does not travel.
  Recipe noisy = swiglu();
  noisy.clamp_up = {false, -1, 1};
  EXPECT_EQ(encode(LayerRecipe{.recipe = noisy}), good);
  EXPECT_FALSE(decode_layer_recipe(encode(LayerRecipe{.recipe_id = kRecipesMax, .recipe = swiglu()})));
}

}  // namespace
}  // namespace kvasir::wire
