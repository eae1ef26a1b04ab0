// EXEC and RESULT: the hot path. Tables are checked in place, rows are never copied.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <format>
#include <vector>

#include "base/check.h"
#include "wire/codec.h"

namespace kvasir::wire {
namespace {

std::unexpected<Error> refuse(std::string_view message, std::string_view why) {
  return retry_elsewhere(std::format("the {} is not valid: {}.", message, why));
}

bool is_known(RowType type) { return type <= RowType::kQ8; }

// As one number: expert in the high half, row in the low half.
std::uint64_t pair_key(const std::byte* pairs, std::size_t i) { return load_le<std::uint64_t>(pairs + i * kPairBytes); }

// Whether no (row, expert) occurs twice. Senders group pairs by expert or by row, so one
// pass nearly always decides; only an unordered table is sorted.
bool pairs_are_distinct(ByteSpan pairs) {
  const std::size_t n = pairs.size() / kPairBytes;
  bool by_expert = true;
  bool by_row = true;
  for (std::size_t i = 1; i < n; ++i) {
    const std::uint64_t a = pair_key(pairs.data(), i - 1);
    const std::uint64_t b = pair_key(pairs.data(), i);
    by_expert &= a < b;
    by_row &= std::rotl(a, 32) < std::rotl(b, 32);
  }
  if (by_expert || by_row) return true;

  constexpr std::size_t kQuadraticMax = 16;  // 120 compares are cheaper than an allocation
  if (n <= kQuadraticMax) {
    for (std::size_t i = 1; i < n; ++i)
      for (std::size_t j = 0; j < i; ++j)
        if (pair_key(pairs.data(), i) == pair_key(pairs.data(), j)) return false;
    return true;
  }
  std::vector<std::uint64_t> keys(n);  // n <= kExecPairsMax
  std::memcpy(keys.data(), pairs.data(), n * kPairBytes);
  std::ranges::sort(keys);
  return std::ranges::adjacent_find(keys) == keys.end();
}

// What both ends check of the fixed part; gives the bytes of one row.
Result<std::size_t> check_exec_head(const ExecHead& head) {
  if (!is_known(head.numerics) || !is_known(head.row_type) || !is_known(head.result_type) ||
      head.result_kind > ResultKind::kWeightedSum)
    return refuse("EXEC", "a numerics class, row type or result kind is unknown");
  if (head.recipe_id >= kRecipesMax)
    return refuse("EXEC", std::format("its recipe number must be below {}", kRecipesMax));
  if (head.numerics != Numerics::kFast && (head.row_type != RowType::kF32 || head.result_type != RowType::kF32 ||
                                           head.result_kind != ResultKind::kPerPair))
    return refuse("EXEC", "only numerics class fast may use other rows than f32 or weighted sums");
  if (head.n_embd == 0 || head.n_embd > kWidthMax)
    return refuse("EXEC", std::format("n_embd must lie in 1..{}", kWidthMax));
  if (head.n_rows == 0 || head.n_rows > kExecRowsMax)
    return refuse("EXEC", std::format("it must have 1..{} rows", kExecRowsMax));
  if (head.n_pairs == 0 || head.n_pairs > kExecPairsMax)
    return refuse("EXEC", std::format("it must have 1..{} pairs", kExecPairsMax));
  const auto row = row_bytes(head.row_type, head.n_embd);
  const auto result_row = row_bytes(head.result_type, head.n_embd);
  if (!row || !result_row) return refuse("EXEC", "q8 rows need a width that is a multiple of 32");
  // No product below can wrap: rows <= 2^18, row bytes <= 2^22.
  const std::uint64_t answer_rows = head.result_kind == ResultKind::kPerPair ? head.n_pairs : head.n_rows;
  if (answer_rows * *result_row > kAnswerBytesMax)
    return refuse("EXEC", std::format("its answer would exceed {} bytes; send fewer pairs at once", kAnswerBytesMax));
  return *row;
}

std::uint64_t exec_table_bytes(const ExecHead& head) {
  const std::uint64_t weights = head.result_kind == ResultKind::kWeightedSum ? head.n_pairs * sizeof(float) : 0;
  return head.n_pairs * std::uint64_t{kPairBytes} + weights;
}

Result<std::size_t> check_result_head(const ResultHead& head) {
  if (!is_known(head.row_type)) return refuse("RESULT", "its row type is unknown");
  if (head.n_embd == 0 || head.n_embd > kWidthMax)
    return refuse("RESULT", std::format("n_embd must lie in 1..{}", kWidthMax));
  const auto row = row_bytes(head.row_type, head.n_embd);
  if (!row) return refuse("RESULT", "q8 rows need a width that is a multiple of 32");
  if (head.n_rows == 0 || head.total_rows > kExecPairsMax || head.first_row > head.total_rows ||
      head.n_rows > head.total_rows - head.first_row)
    return refuse("RESULT", "its rows do not lie inside the answer");
  return *row;
}

}  // namespace

Pair ExecView::pair(std::size_t i) const {
  const std::byte* at = pairs.data() + i * kPairBytes;
  return {load_le<std::uint32_t>(at), load_le<std::uint32_t>(at + 4)};
}

float ExecView::weight(std::size_t i) const { return load_le<float>(weights.data() + i * sizeof(float)); }

Result<ExecView> decode_exec(ByteSpan payload) {
  if (payload.size() < kExecHeadBytes) return refuse("EXEC", "it is too short");
  ByteCursor in(payload);
  ExecView view;
  ExecHead& head = view.head;
  head.recipe_id = in.get<std::uint32_t>();
  head.numerics = in.get<Numerics>();
  head.row_type = in.get<RowType>();
  head.result_type = in.get<RowType>();
  head.result_kind = in.get<ResultKind>();
  head.n_rows = in.get<std::uint32_t>();
  head.n_pairs = in.get<std::uint32_t>();
  head.n_embd = in.get<std::uint32_t>();
  if (in.get<std::uint32_t>() != 0) return refuse("EXEC", "a reserved field is not 0");
  KVASIR_ASSIGN(const std::size_t row, check_exec_head(head));
  if (payload.size() != kExecHeadBytes + exec_table_bytes(head) + std::uint64_t{head.n_rows} * row)
    return refuse("EXEC", "its length does not agree with its counts");
  view.pairs = in.get_bytes(head.n_pairs * kPairBytes);
  if (head.result_kind == ResultKind::kWeightedSum) view.weights = in.get_bytes(head.n_pairs * sizeof(float));
  view.rows = in.get_bytes(head.n_rows * row);
  KVASIR_CHECK(in.at_end());

  std::uint32_t row_max = 0;
  std::uint32_t expert_max = 0;
  for (std::size_t i = 0; i < head.n_pairs; ++i) {
    const Pair pair = view.pair(i);
    row_max = std::max(row_max, pair.row);
    expert_max = std::max(expert_max, pair.expert);
  }
  if (row_max >= head.n_rows) return refuse("EXEC", "a pair names a row that was not sent");
  if (expert_max >= kExpertsMax) return refuse("EXEC", std::format("an expert's number must be below {}", kExpertsMax));
  if (!pairs_are_distinct(view.pairs)) return refuse("EXEC", "a pair of row and expert occurs twice");
  for (std::size_t i = 0; i < view.weights.size() / sizeof(float); ++i)
    if (!std::isfinite(view.weight(i))) return refuse("EXEC", "a weight is not finite");
  return view;
}

Result<ResultView> decode_result(ByteSpan payload) {
  if (payload.size() < kResultHeadBytes) return refuse("RESULT", "it is too short");
  ByteCursor in(payload);
  ResultView view;
  ResultHead& head = view.head;
  head.row_type = in.get<RowType>();
  const auto reserved_a = in.get<std::uint8_t>();
  const auto reserved_b = in.get<std::uint16_t>();
  head.n_embd = in.get<std::uint32_t>();
  head.first_row = in.get<std::uint32_t>();
  head.n_rows = in.get<std::uint32_t>();
  head.total_rows = in.get<std::uint32_t>();
  head.compute_us = in.get<std::uint32_t>();
  if (reserved_a != 0 || reserved_b != 0) return refuse("RESULT", "a reserved field is not 0");
  KVASIR_ASSIGN(const std::size_t row, check_result_head(head));
  if (payload.size() != kResultHeadBytes + std::uint64_t{head.n_rows} * row)
    return refuse("RESULT", "its length does not agree with its counts");
  view.rows = in.get_bytes(payload.size() - kResultHeadBytes);
  return view;
}

Result<Bytes> encode_exec_prefix(std::uint64_t request_id, const ExecHead& head, std::span<const Pair> pairs,
                                 std::span<const float> weights, ByteSpan rows, bool checksum) {
  KVASIR_ASSIGN(const std::size_t row, check_exec_head(head));
  const std::size_t n_weights = head.result_kind == ResultKind::kWeightedSum ? head.n_pairs : 0;
  KVASIR_CHECK(pairs.size() == head.n_pairs && weights.size() == n_weights && rows.size() == head.n_rows * row);
  const std::uint64_t payload_bytes = kExecHeadBytes + exec_table_bytes(head) + rows.size();
  if (payload_bytes > kFramePayloadBytesMax)
    return refuse("EXEC", std::format("it would exceed {} bytes; send fewer rows at once", kFramePayloadBytesMax));

  Bytes prefix(kHeaderBytes + kExecHeadBytes + exec_table_bytes(head));
  std::byte* at = prefix.data() + kHeaderBytes;
  store_le(at + 0, head.recipe_id);
  store_le(at + 4, head.numerics);
  store_le(at + 5, head.row_type);
  store_le(at + 6, head.result_type);
  store_le(at + 7, head.result_kind);
  store_le(at + 8, head.n_rows);
  store_le(at + 12, head.n_pairs);
  store_le(at + 16, head.n_embd);
  at += kExecHeadBytes;  // the last field is reserved, 0
  for (const Pair& pair : pairs) {
    store_le(at, pair.row);
    store_le(at + 4, pair.expert);
    at += kPairBytes;
  }
  if (!weights.empty()) std::memcpy(at, weights.data(), weights.size_bytes());

  FrameHeader header{.type = FrameType::kExec, .request_id = request_id,
                     .payload_bytes = static_cast<std::uint32_t>(payload_bytes)};
  if (checksum) {
    header.flags = kFlagChecksum;
    header.checksum = payload_checksum(std::span(prefix).subspan(kHeaderBytes), rows);
  }
  encode_header(header, std::span(prefix).first<kHeaderBytes>());
  return prefix;
}

Bytes encode_result_prefix(std::uint64_t request_id, const ResultHead& head, ByteSpan rows, bool more, bool checksum) {
  const auto row = check_result_head(head);
  KVASIR_CHECK(row && rows.size() == head.n_rows * *row && kResultHeadBytes + rows.size() <= kResultPayloadBytesMax);

  Bytes prefix(kHeaderBytes + kResultHeadBytes);
  std::byte* at = prefix.data() + kHeaderBytes;
  store_le(at + 0, head.row_type);  // 3 reserved bytes follow, 0
  store_le(at + 4, head.n_embd);
  store_le(at + 8, head.first_row);
  store_le(at + 12, head.n_rows);
  store_le(at + 16, head.total_rows);
  store_le(at + 20, head.compute_us);

  FrameHeader header{.type = FrameType::kResult, .flags = more ? kFlagMore : std::uint8_t{0}, .request_id = request_id,
                     .payload_bytes = static_cast<std::uint32_t>(kResultHeadBytes + rows.size())};
  if (checksum) {
    header.flags |= kFlagChecksum;
    header.checksum = payload_checksum(std::span(prefix).subspan(kHeaderBytes), rows);
  }
  encode_header(header, std::span(prefix).first<kHeaderBytes>());
  return prefix;
}

std::uint32_t result_rows_per_frame(RowType type, std::uint32_t n_embd) {
  const auto row = row_bytes(type, n_embd);
  KVASIR_CHECK(row && *row > 0);
  return static_cast<std::uint32_t>((kResultPayloadBytesMax - kResultHeadBytes) / *row);
}

std::uint32_t result_rows_at_once(RowType type, std::uint32_t n_embd) {
  constexpr std::size_t kBytes = 128 << 10;  // thrice that, while it is copied, fits a core's own cache
  const std::size_t row = row_bytes(type, n_embd).value_or(0);
  KVASIR_CHECK(row > 0);
  return std::max(1u, static_cast<std::uint32_t>(kBytes / row));
}

// The widest row must fit one RESULT frame, so that the quotient above is at least 1.
static_assert(std::uint64_t{kWidthMax} * sizeof(float) + kResultHeadBytes <= kResultPayloadBytesMax);

}  // namespace kvasir::wire
