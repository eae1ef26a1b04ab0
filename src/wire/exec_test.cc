#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "wire/codec.h"

namespace kvasir::wire {
namespace {

constexpr std::uint32_t kEmbd = 32;

// The payload of an EXEC with these pairs.
Result<Bytes> exec_payload(ExecHead head, std::span<const Pair> pairs, std::span<const float> weights = {}) {
  if (head.n_embd == 0) head.n_embd = kEmbd;
  head.n_pairs = static_cast<std::uint32_t>(pairs.size());
  const Bytes rows(head.n_rows * row_bytes(head.row_type, head.n_embd).value_or(0), std::byte{0x3f});
  KVASIR_ASSIGN(Bytes frame, encode_exec_prefix(9, head, pairs, weights, rows, true));
  frame.insert(frame.end(), rows.begin(), rows.end());
  const FrameHeader header = *decode_header(std::span(frame).first<kHeaderBytes>());
  frame.erase(frame.begin(), frame.begin() + kHeaderBytes);
  EXPECT_EQ(header.request_id, 9u);
  EXPECT_EQ(header.payload_bytes, frame.size());
  EXPECT_TRUE(checksum_matches(header, frame));
  return frame;
}

TEST(Exec, ViewsPointIntoThePayload) {
  const Pair pairs[] = {{0, 5}, {1, 5}, {1, 200}};
  const float weights[] = {0.5f, 0.25f, 0.125f};
  const ExecHead head{.recipe_id = 3,
                      .numerics = Numerics::kFast,
                      .row_type = RowType::kF16,
                      .result_type = RowType::kQ8,
                      .result_kind = ResultKind::kWeightedSum,
                      .n_rows = 2};
  const Bytes payload = *exec_payload(head, pairs, weights);
  const ExecView view = *decode_exec(payload);
  EXPECT_EQ(view.head.recipe_id, 3u);
  EXPECT_EQ(view.head.result_type, RowType::kQ8);
  EXPECT_EQ(view.pair(2), pairs[2]);
  EXPECT_EQ(view.weight(1), 0.25f);
  EXPECT_EQ(view.rows.data(), payload.data() + kExecHeadBytes + 3 * 12);
  EXPECT_EQ(view.rows.size(), 2 * kEmbd * 2);
}

TEST(Exec, DuplicatePairsAreFoundInAnyOrder) {
  std::mt19937_64 random(1);
  for (std::size_t n : {2, 3, 8, 16, 17, 18, 100, 3000}) {
    std::vector<Pair> pairs;
    for (std::uint32_t i = 0; i < n; ++i) pairs.push_back({i % 64, i / 64});
    const ExecHead head{.n_rows = 64};
    const auto accepted = [&] { return decode_exec(*exec_payload(head, pairs)).has_value(); };
    EXPECT_TRUE(accepted());  // by expert
    std::ranges::sort(pairs, {}, [](const Pair& p) { return std::pair(p.row, p.expert); });
    EXPECT_TRUE(accepted());  // by row
    std::ranges::shuffle(pairs, random);
    EXPECT_TRUE(accepted());
    for (int i = 0; i < 20; ++i) {
      const std::size_t from = random() % n;
      const std::size_t to = (from + 1 + random() % (n - 1)) % n;
      const Pair saved = std::exchange(pairs[to], pairs[from]);
      EXPECT_FALSE(accepted()) << n << ' ' << from << ' ' << to;
      pairs[to] = saved;
    }
  }
}

TEST(Exec, RowsAndExpertsStayInside) {
  EXPECT_TRUE(decode_exec(*exec_payload({.n_rows = 2}, std::vector<Pair>{{1, kExpertsMax - 1}})));
  EXPECT_FALSE(decode_exec(*exec_payload({.n_rows = 2}, std::vector<Pair>{{2, 0}})));
  EXPECT_FALSE(decode_exec(*exec_payload({.n_rows = 2}, std::vector<Pair>{{UINT32_MAX, 0}})));
  EXPECT_FALSE(decode_exec(*exec_payload({.n_rows = 2}, std::vector<Pair>{{0, kExpertsMax}})));
}

TEST(Exec, ExactRequestsCarryF32RowsPerPair) {
  const std::vector<Pair> pairs = {{0, 0}};
  for (const Numerics numerics : {Numerics::kExact, Numerics::kInvariant}) {
    EXPECT_TRUE(exec_payload({.numerics = numerics, .n_rows = 1}, pairs));
    EXPECT_FALSE(exec_payload({.numerics = numerics, .row_type = RowType::kF16, .n_rows = 1}, pairs));
    EXPECT_FALSE(exec_payload({.numerics = numerics, .result_type = RowType::kBF16, .n_rows = 1}, pairs));
    EXPECT_FALSE(exec_payload({.numerics = numerics, .result_kind = ResultKind::kWeightedSum, .n_rows = 1}, pairs));
  }
}

TEST(Exec, SendersLearnTheLimits) {
  const std::vector<Pair> one = {{0, 0}};
  EXPECT_FALSE(exec_payload({.n_rows = 0}, one));
  EXPECT_FALSE(exec_payload({.n_rows = 1}, {}));
  EXPECT_FALSE(exec_payload({.recipe_id = kRecipesMax, .n_rows = 1}, one));
  EXPECT_FALSE(exec_payload({.numerics = Numerics::kFast, .row_type = RowType::kQ8, .n_rows = 1, .n_embd = 33}, one));
  EXPECT_FALSE(exec_payload({.n_rows = 17, .n_embd = kWidthMax}, one));  // 68 MiB of rows
  // 4 MiB of rows that ask for 516 MiB of answer.
  std::vector<Pair> many;
  for (std::uint32_t i = 0; i < 129; ++i) many.push_back({0, i});
  EXPECT_FALSE(exec_payload({.n_rows = 1, .n_embd = kWidthMax}, many));
  many.pop_back();
  EXPECT_TRUE(exec_payload({.n_rows = 1, .n_embd = kWidthMax}, many));
}

TEST(Exec, FieldsOutOfLimitsAreRefused) {
  const Bytes good = *exec_payload({.n_rows = 2}, std::vector<Pair>{{0, 1}, {1, 1}});
  ASSERT_TRUE(decode_exec(good));
  const auto with = [&](std::size_t at, std::uint32_t value) {
    Bytes bad = good;
    store_le(bad.data() + at, value);
    return decode_exec(bad).has_value();
  };
  for (std::size_t at : {8, 12, 16})  // n_rows, n_pairs, n_embd
    for (std::uint32_t value : {0u, 1u, 3u, 0x7fffffffu, UINT32_MAX})
      EXPECT_FALSE(with(at, value)) << at << ' ' << value;
  EXPECT_FALSE(with(0, kRecipesMax));
  EXPECT_FALSE(with(20, 1));  // reserved
  for (std::size_t at = 4; at < 8; ++at) {
    Bytes bad = good;
    bad[at] = std::byte{4};
    EXPECT_FALSE(decode_exec(bad)) << at;
  }
}

TEST(Exec, WeightsMustBeFinite) {
  const ExecHead head{.numerics = Numerics::kFast, .result_kind = ResultKind::kWeightedSum, .n_rows = 1};
  const std::vector<Pair> pairs = {{0, 0}, {0, 1}};
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const float weights[] = {1, bad};
    EXPECT_FALSE(decode_exec(*exec_payload(head, pairs, weights)));
  }
}

TEST(ResultMessage, RowsLieInsideTheAnswer) {
  const auto payload = [](const ResultHead& head) {
    const Bytes rows(head.n_rows * *row_bytes(head.row_type, head.n_embd));
    Bytes frame = encode_result_prefix(4, head, rows, true, true);
    frame.insert(frame.end(), rows.begin(), rows.end());
    const FrameHeader header = *decode_header(std::span(frame).first<kHeaderBytes>());
    EXPECT_EQ(header.flags, kFlagChecksum | kFlagMore);
    frame.erase(frame.begin(), frame.begin() + kHeaderBytes);
    EXPECT_TRUE(checksum_matches(header, frame));
    return frame;
  };
  const ResultHead head{
      .row_type = RowType::kBF16, .n_embd = kEmbd, .first_row = 6, .n_rows = 2, .total_rows = 8, .compute_us = 50};
  const Bytes good = payload(head);
  EXPECT_EQ(decode_result(good)->head, head);
  EXPECT_EQ(decode_result(good)->rows.size(), 2 * kEmbd * 2);
  const auto with = [&](std::size_t at, std::uint32_t value) {
    Bytes bad = good;
    store_le(bad.data() + at, value);
    return decode_result(bad).has_value();
  };
  EXPECT_FALSE(with(0, 4));           // row type
  EXPECT_FALSE(with(0, 0x102));       // reserved
  EXPECT_FALSE(with(8, 7));           // past the answer
  EXPECT_FALSE(with(8, UINT32_MAX));  // would wrap
  EXPECT_FALSE(with(12, 1));
  EXPECT_FALSE(with(12, 0));
  EXPECT_FALSE(with(16, 7));
  EXPECT_FALSE(with(16, UINT32_MAX));
}

TEST(ResultMessage, RowsPerFrameFillsTheFrame) {
  EXPECT_EQ(result_rows_per_frame(RowType::kF32, 3072), (kResultPayloadBytesMax - kResultHeadBytes) / 12288);
  EXPECT_GE(result_rows_per_frame(RowType::kF32, kWidthMax), 1u);
  EXPECT_EQ(result_rows_at_once(RowType::kF32, 3072), 10u) << "the 8 of a token are one frame";
  EXPECT_EQ(result_rows_at_once(RowType::kF32, kWidthMax), 1u);
}

}  // namespace
}  // namespace kvasir::wire
