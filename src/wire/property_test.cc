// Seeded properties: what is encoded decodes to itself; what is cut or changed at random is
// refused or decodes within its limits (decode_any checks that).

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>

#include "wire/decode_any.h"
#include "wire/samples.h"

namespace kvasir::wire {
namespace {

using Random = std::mt19937_64;

std::uint32_t below(Random& random, std::uint64_t n) { return static_cast<std::uint32_t>(random() % n); }
bool coin(Random& random) { return random() % 2 == 0; }

std::string random_text(Random& random) {
  static constexpr const char* kPieces[] = {"a", "Z", " ", "~", "é", "模", "\xf0\x9f\x90\x8d", "0.27", "haswell"};
  std::string text;
  for (std::uint32_t n = below(random, 40); n > 0; --n) text += kPieces[below(random, std::size(kPieces))];
  return text.substr(0, kTextBytesMax);
}

std::array<std::byte, 32> random_id(Random& random) {
  std::array<std::byte, 32> id;
  for (std::byte& b : id) b = static_cast<std::byte>(random());
  return id;
}

Hello random_hello(Random& random) {
  return {.protocol_version = static_cast<std::uint16_t>(random()),
          .role = coin(random) ? Role::kBackbone : Role::kWorker,
          .numerics = static_cast<Numerics>(below(random, 3)),
          .software = random_text(random),
          .numerics_id = {random_text(random), random_text(random), random_id(random)},
          .token = random_text(random)};
}

Holdings random_holdings(Random& random) {
  Holdings holdings;
  holdings.upload_bytes_free = random() % (kUploadBytesMax + 1);
  for (std::uint32_t n = below(random, 6); n > 0; --n) {
    Holding& entry = holdings.entries.emplace_back();
    entry.layer_id = random_id(random);
    entry.layer = below(random, kLayersMax);
    entry.group = static_cast<ExpertGroup>(below(random, 2));
    entry.n_expert = 1 + below(random, kExpertsMax);
    entry.n_embd = 1 + below(random, kWidthMax);
    for (std::uint32_t r = below(random, 8); r > 0; --r) {
      const std::uint32_t begin = below(random, entry.n_expert);
      entry.experts.add({begin, begin + 1 + below(random, entry.n_expert - begin)});
    }
  }
  return holdings;
}

Clamp random_clamp(Random& random) {
  if (coin(random)) return {};
  const float a = static_cast<float>(below(random, 100)) - 50;
  return {true, coin(random) ? -INFINITY : a, coin(random) ? INFINITY : a + static_cast<float>(below(random, 9))};
}

LayerRecipe random_recipe(Random& random) {
  Recipe recipe;
  recipe.group = static_cast<ExpertGroup>(below(random, 2));
  recipe.gate_layout = static_cast<GateLayout>(below(random, 3));
  const bool gated = recipe.gate_layout != GateLayout::kNone;
  recipe.activation = static_cast<Activation>(gated ? below(random, 9) : 16 + below(random, 6));
  const bool split = recipe.gate_layout == GateLayout::kSplit;
  if (!split && recipe.activation == Activation::kSoftCapSiluMul) recipe.activation = Activation::kSiluMul;
  recipe.gate_scale = split && coin(random);
  recipe.gate_bias = split && coin(random);
  recipe.up_scale = coin(random);
  recipe.up_bias = coin(random);
  recipe.down_scale = coin(random);
  recipe.down_bias = coin(random);
  const auto number = [&] { return static_cast<float>(below(random, 1000)) / 8; };
  if (recipe.activation == Activation::kSwigluOai) recipe.alpha = number();
  if (recipe.activation == Activation::kSwigluOai || recipe.activation == Activation::kSwigluClamp)
    recipe.limit = number();
  if (recipe.activation == Activation::kSoftCapSiluMul) {
    recipe.cap_gate = {number(), number()};
    recipe.cap_up = {number(), number()};
  }
  if (gated) recipe.clamp_gate = random_clamp(random);
  if (recipe.activation == Activation::kSiluMul) recipe.clamp_gate_activated = random_clamp(random);
  recipe.clamp_up = random_clamp(random);
  recipe.n_embd = 1 + below(random, kWidthMax);
  recipe.n_ff = 1 + below(random, kWidthMax);
  recipe.n_expert = 1 + below(random, kExpertsMax);
  return {.recipe_id = below(random, kRecipesMax), .layer_id = random_id(random), .recipe = recipe};
}

TEST(Property, DecodeIsTheInverseOfEncode) {
  Random random(11);
  for (int i = 0; i < 3000; ++i) {
    const Hello hello = random_hello(random);
    ASSERT_EQ(*decode_hello(encode(hello)), hello);
    const Holdings holdings = random_holdings(random);
    ASSERT_EQ(*decode_holdings(encode(holdings)), holdings);
    const LayerRecipe recipe = random_recipe(random);
    ASSERT_EQ(*decode_layer_recipe(encode(recipe)), recipe);
    const ErrorMessage error{static_cast<ErrorCode>(below(random, 13)), random_text(random)};
    ASSERT_EQ(*decode_error(encode(error)), error);
    const Ping ping{random()};
    ASSERT_EQ(*decode_ping(encode(ping)), ping);
    const Pong pong{random(), below(random, 99), below(random, 99), below(random, 1001), below(random, 99)};
    ASSERT_EQ(*decode_pong(encode(pong)), pong);
  }
}

TEST(Property, ExecAndResultRoundTrip) {
  Random random(12);
  for (int i = 0; i < 1000; ++i) {
    ExecHead head{.recipe_id = below(random, kRecipesMax), .numerics = static_cast<Numerics>(below(random, 3)),
                  .n_rows = 1 + below(random, 20), .n_embd = 32 * (1 + below(random, 4))};
    if (head.numerics == Numerics::kFast) {
      head.row_type = static_cast<RowType>(below(random, 4));
      head.result_type = static_cast<RowType>(below(random, 4));
      head.result_kind = static_cast<ResultKind>(below(random, 2));
    }
    std::set<std::pair<std::uint32_t, std::uint32_t>> chosen;
    while (chosen.size() < 1 + i % 64u) chosen.emplace(below(random, head.n_rows), below(random, 256));
    std::vector<Pair> pairs;
    for (const auto& [row, expert] : chosen) pairs.push_back({row, expert});
    std::ranges::shuffle(pairs, random);
    head.n_pairs = static_cast<std::uint32_t>(pairs.size());
    std::vector<float> weights;
    if (head.result_kind == ResultKind::kWeightedSum)
      for (std::size_t p = 0; p < pairs.size(); ++p) weights.push_back(static_cast<float>(below(random, 1000)) / 999);
    Bytes rows(head.n_rows * *row_bytes(head.row_type, head.n_embd));
    for (std::byte& b : rows) b = static_cast<std::byte>(random());

    const std::uint64_t request_id = random();
    const Bytes frame = with_rows(*encode_exec_prefix(request_id, head, pairs, weights, rows, coin(random)), rows);
    const FrameHeader header = *decode_header(std::span(frame).first<kHeaderBytes>());
    const ByteSpan payload = ByteSpan(frame).subspan(kHeaderBytes);
    ASSERT_EQ(header.request_id, request_id);
    ASSERT_TRUE(checksum_matches(header, payload));
    ASSERT_TRUE(decode_any(FrameType::kExec, payload));
    const ExecView view = *decode_exec(payload);
    ASSERT_EQ(view.head, head);
    ASSERT_TRUE(std::ranges::equal(view.rows, rows));
    for (std::size_t p = 0; p < pairs.size(); ++p) ASSERT_EQ(view.pair(p), pairs[p]);
    for (std::size_t p = 0; p < weights.size(); ++p) ASSERT_EQ(view.weight(p), weights[p]);

    const ResultHead result{.row_type = head.row_type,
                            .n_embd = head.n_embd,
                            .first_row = below(random, 100),
                            .n_rows = head.n_rows,
                            .total_rows = 200,
                            .compute_us = below(random, 1u << 31)};
    const Bytes answer = with_rows(encode_result_prefix(request_id, result, rows, coin(random), coin(random)), rows);
    ASSERT_TRUE(decode_any(FrameType::kResult, ByteSpan(answer).subspan(kHeaderBytes)));
    ASSERT_EQ(decode_result(ByteSpan(answer).subspan(kHeaderBytes))->head, result);
  }
}

TEST(Property, EveryTruncationAndExtensionIsRefused) {
  for (const SampleFrame& sample : sample_frames()) {
    const FrameType type = decode_header(std::span(sample.bytes).first<kHeaderBytes>())->type;
    Bytes payload(sample.bytes.begin() + kHeaderBytes, sample.bytes.end());
    ASSERT_TRUE(decode_any(type, payload)) << sample.name;
    for (std::size_t size = 0; size < payload.size(); ++size)
      ASSERT_FALSE(decode_any(type, ByteSpan(payload).first(size))) << sample.name << ' ' << size;
    payload.push_back(std::byte{0});
    ASSERT_FALSE(decode_any(type, payload)) << sample.name;
  }
}

TEST(Property, MutationsAreRefusedOrStayWithinLimits) {
  Random random(13);
  constexpr std::uint32_t kTelling[] = {0,     1,      2,       0x7f,       0x80,       0xff,
                                        0x100, 0xffff, 0x10000, 0x7fffffff, 0x80000000, 0xffffffff};
  std::size_t accepted = 0;
  std::size_t refused = 0;
  for (const SampleFrame& sample : sample_frames()) {
    const FrameType type = decode_header(std::span(sample.bytes).first<kHeaderBytes>())->type;
    for (int i = 0; i < 6000; ++i) {
      Bytes frame = sample.bytes;
      for (std::uint32_t n = 1 + below(random, 4); n > 0; --n) {
        const std::uint32_t at = below(random, frame.size());
        if (coin(random)) {
          frame[at] = static_cast<std::byte>(random());
        } else if (at + 4 <= frame.size()) {
          store_le(frame.data() + at, kTelling[below(random, std::size(kTelling))]);
        }
      }
      if (i % 8 == 0) frame.resize(kHeaderBytes + below(random, frame.size() - kHeaderBytes + 1));
      const ByteSpan payload = ByteSpan(frame).subspan(kHeaderBytes);
      const auto header = decode_header(std::span(frame).first<kHeaderBytes>());
      if (header) {
        ASSERT_LE(header->payload_bytes, payload_bytes_max(header->type));
      }
      ++(decode_any(type, payload) ? accepted : refused);
      decode_any(static_cast<FrameType>(1 + below(random, 11)), payload);
    }
  }
  EXPECT_GT(accepted, 1000u);  // both sides of the property were seen
  EXPECT_GT(refused, 1000u);
}

}  // namespace
}  // namespace kvasir::wire
