// Fixed pieces of the hot path for callgrind to count: rows and frames to bytes and back, and rounds of
// the dispatch core with the messages of both sides, without sockets, threads or clocks. Counts do not
// depend on the machine's speed or load; bench/callgrind runs this and compares.
//
// Each operation runs warm, some times between two client requests; callgrind writes one part for it,
// named after it. Prints the names and how often each ran. Without valgrind it only runs.
#include <valgrind/callgrind.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "base/check.h"
#include "dispatch/client/row_copy.h"
#include "dispatch/core/round_engine.h"
#include "wire/checksum_kernels.h"
#include "wire/codec.h"
#include "wire/row_kernels.h"

namespace kvasir {
namespace {

using namespace std::chrono_literals;
using wire::RowType;

constexpr int kWarmups = 3;  // buffers grow, tables fill
constexpr int kRepeats = 20, kRepeatsOfPrompt = 3;
constexpr std::uint32_t kWidth = 3072, kTopK = 8, kExperts = 64, kWorkers = 4;
constexpr std::uint32_t kPrompt = 512;       // rows
constexpr std::uint32_t kPromptWidth = 256;  // narrow: what is done for each pair shows beside what for each byte

void measure(const char* name, int repeats, const std::function<void()>& once) {
  for (int i = 0; i < kWarmups; ++i) once();
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_ZERO_STATS;
  for (int i = 0; i < repeats; ++i) once();
  CALLGRIND_STOP_INSTRUMENTATION;
  CALLGRIND_DUMP_STATS_AT(name);
  std::printf("%s\t%d\n", name, repeats);
}

std::vector<float> ramp(std::size_t n) {
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = static_cast<float>(i % 97) * 0.03f - 1.4f;
  return values;
}

std::vector<wire::Pair> pairs_of(std::uint32_t n_rows, std::uint32_t shift = 0) {
  std::vector<wire::Pair> pairs;
  for (std::uint32_t row = 0; row < n_rows; ++row)
    for (std::uint32_t k = 0; k < kTopK; ++k) pairs.push_back({row, (shift + row * 3 + k * 7) % kExperts});
  return pairs;
}

// --- rows ---------------------------------------------------------------------------------

// Named kernels: which of them a machine picks by itself depends on its processor.
void measure_rows() {
  const std::vector<float> row = ramp(kWidth);
  std::vector<float> back(kWidth);
  const auto both = [&](const char* name, RowType type, auto encode, auto decode) {
    Bytes bytes(*wire::row_bytes(type, kWidth));
    measure(name, kRepeats, [&, encode, decode] {
      encode(row, bytes.data());
      decode(bytes.data(), back);
    });
  };
  const wire::RowKernels& plain = wire::kBaselineRowKernels;
  both("row f16, baseline", RowType::kF16, plain.f16_encode, plain.f16_decode);
  both("row bf16, baseline", RowType::kBF16, plain.bf16_encode, plain.bf16_decode);
  both("row q8, baseline", RowType::kQ8, plain.q8_encode, plain.q8_decode);
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return;
  const wire::RowKernels& avx2 = wire::best_row_kernels();
  both("row f16, avx2", RowType::kF16, avx2.f16_encode, avx2.f16_decode);
  both("row bf16, avx2", RowType::kBF16, avx2.bf16_encode, avx2.bf16_decode);
  both("row q8, avx2", RowType::kQ8, avx2.q8_encode, avx2.q8_decode);
#endif
}

// --- messages -----------------------------------------------------------------------------

Bytes whole(const Bytes& prefix, ByteSpan rows) {
  Bytes frame = prefix;
  frame.insert(frame.end(), rows.begin(), rows.end());
  return frame;
}

// What a reader does with a frame that has come.
ByteSpan open_frame(ByteSpan frame) {
  const auto header = wire::decode_header(frame.first<wire::kHeaderBytes>());
  const ByteSpan payload = frame.subspan(wire::kHeaderBytes);
  KVASIR_CHECK(header.has_value() && wire::checksum_matches(*header, payload));
  return payload;
}

void measure_exec(const char* encoding, const char* decoding, int repeats, std::uint32_t n_rows, std::uint32_t width) {
  const std::vector<float> values = ramp(std::size_t{n_rows} * width);
  const ByteSpan rows = std::as_bytes(std::span(values));
  const std::vector<wire::Pair> pairs = pairs_of(n_rows);
  const wire::ExecHead head{.n_rows = n_rows, .n_pairs = static_cast<std::uint32_t>(pairs.size()), .n_embd = width};
  measure(encoding, repeats,
          [&] { KVASIR_CHECK(wire::encode_exec_prefix(7, head, pairs, {}, rows, true).has_value()); });
  const Bytes frame = whole(wire::encode_exec_prefix(7, head, pairs, {}, rows, true).value(), rows);
  measure(decoding, repeats, [&] { KVASIR_CHECK(wire::decode_exec(open_frame(frame)).has_value()); });
}

void measure_result() {
  const std::vector<float> values = ramp(std::size_t{kTopK} * kWidth);
  const ByteSpan rows = std::as_bytes(std::span(values));
  const wire::ResultHead head{.n_embd = kWidth, .n_rows = kTopK, .total_rows = kTopK};
  measure("encode result, 8 rows", kRepeats, [&] { wire::encode_result_prefix(7, head, rows, false, true); });
  const Bytes frame = whole(wire::encode_result_prefix(7, head, rows, false, true), rows);
  measure("decode result, 8 rows", kRepeats, [&] { KVASIR_CHECK(wire::decode_result(open_frame(frame)).has_value()); });
}

void measure_pong() {
  const wire::Pong pong{.sent_ns = 1, .queued = 2, .wait_us = 4800, .busy_permille = 500, .row_us = 300};
  measure("pong there and back", kRepeats, [&] {
    const Bytes frame = wire::encode_frame(wire::FrameType::kPong, 0, pong, true);
    KVASIR_CHECK(wire::decode_pong(open_frame(frame)).has_value());
  });
}

// --- rounds -------------------------------------------------------------------------------

// Workers that each hold every expert; every request is answered, in the order of asking.
class Rounds {
 public:
  Rounds(std::uint32_t n_rows, std::uint32_t width, bool sums)
      : n_rows_(n_rows),
        width_(width),
        sums_(sums),
        type_(sums ? RowType::kF16 : RowType::kF32),
        fleet_(kWorkers, {}, 3),
        engine_(kWorkers, true, {}),
        rows_(ramp(std::size_t{n_rows} * width)),
        row_bytes_(*wire::row_bytes(type_, width)),
        sent_rows_(n_rows * row_bytes_),
        out_(std::size_t{n_rows} * (sums ? 1 : kTopK) * width),
        sum_(width) {
    key_.id[0] = std::byte{1};
    wire::Holding held{
        .layer_id = key_.id, .n_expert = kExperts, .n_embd = width_, .experts = ExpertSet::all(kExperts)};
    for (dispatch::WorkerIndex w = 0; w < kWorkers; ++w) {
      fleet_.on_connected(w, 1ms);
      fleet_.on_holdings(w, {{held}});
      engine_.link_up(w);
    }
  }

  void once() {
    const std::vector<wire::Pair> pairs = pairs_of(n_rows_, shift_++);
    if (sums_) weights_.assign(pairs.size(), 0.125f);
    if (sums_) std::ranges::fill(out_, 0.0f);
    now_ += 1ms;
    KVASIR_CHECK(engine_
                     .begin(fleet_,
                            {.key = key_,
                             .n_expert = kExperts,
                             .n_rows = n_rows_,
                             .n_embd = width_,
                             .row_type = type_,
                             .result_type = type_,
                             .request_rows_max = dispatch::exec_rows_max(width_ * sizeof(float)),
                             .request_pairs_max = dispatch::exec_pairs_max(width_ * sizeof(float)),
                             .pairs = pairs,
                             .weights = weights_},
                            now_)
                     .has_value());
    const std::vector<std::uint32_t> to_send = engine_.to_send;
    engine_.to_send.clear();
    for (const std::uint32_t i : to_send) ask(engine_.request(i));
    now_ += 1ms;
    for (const std::uint32_t i : to_send) answer(engine_.request(i));
    KVASIR_CHECK(engine_.finished());
    KVASIR_CHECK(engine_.end(fleet_, now_).has_value());
  }

 private:
  void ask(const dispatch::Request& request) {
    const auto n = static_cast<std::uint32_t>(request.rows.size());
    for (std::uint32_t r = 0; r < n; ++r) {
      const std::span<const float> row(rows_.data() + request.rows[r] * width_, width_);
      const std::span<std::byte> into = std::span(sent_rows_).subspan(r * row_bytes_, row_bytes_);
      if (sums_) wire::kBaselineRowKernels.f16_encode(row, into.data());
      else wire::encode_row(type_, row, into);
    }
    const wire::ExecHead head{.numerics = sums_ ? wire::Numerics::kFast : wire::Numerics::kExact,
                              .row_type = type_,
                              .result_type = type_,
                              .result_kind = sums_ ? wire::ResultKind::kWeightedSum : wire::ResultKind::kPerPair,
                              .n_rows = n,
                              .n_pairs = static_cast<std::uint32_t>(request.pairs.size()),
                              .n_embd = width_};
    const ByteSpan rows = std::span(sent_rows_).first(n * row_bytes_);
    KVASIR_CHECK(
        wire::encode_exec_prefix(request.id, head, request.wire_pairs, request.weights, rows, true).has_value());
  }

  void answer(const dispatch::Request& request) {
    const std::uint32_t total = request.answer_rows();
    const std::uint32_t at_once = wire::result_rows_per_frame(type_, width_);
    for (std::uint32_t first = 0; first < total; first += at_once) {
      const std::uint32_t n = std::min(at_once, total - first);
      const wire::ResultHead head{
          .row_type = type_, .n_embd = width_, .first_row = first, .n_rows = n, .total_rows = total};
      frame_.resize(wire::kHeaderBytes + wire::kResultHeadBytes + n * row_bytes_);
      const ByteSpan rows = ByteSpan(frame_).subspan(wire::kHeaderBytes + wire::kResultHeadBytes);
      const bool more = first + n < total;
      std::ranges::copy(wire::encode_result_prefix(request.id, head, rows, more, true), frame_.begin());
      const auto view = wire::decode_result(open_frame(frame_));
      KVASIR_CHECK(view.has_value());
      const auto verdict =
          engine_.on_result(request.worker, request.id, view->head, more, now_, [&](std::uint32_t i, std::uint32_t at) {
            const std::byte* row = view->rows.data() + i * row_bytes_;
            float* out = out_.data() + at * std::size_t{width_};
            if (!sums_)
              return dispatch::copy_sane(row, out, width_) ? dispatch::RowState::kFinite : dispatch::RowState::kNan;
            wire::kBaselineRowKernels.f16_decode(row, sum_);
            dispatch::add_row(sum_, {out, width_});
            return dispatch::all_sane(sum_) ? dispatch::RowState::kFinite : dispatch::RowState::kNan;
          });
      KVASIR_CHECK(verdict == dispatch::Verdict::kTaken);
    }
  }

  const std::uint32_t n_rows_, width_;
  const bool sums_;
  const RowType type_;
  dispatch::LayerKey key_{};
  dispatch::Fleet fleet_;
  dispatch::RoundEngine engine_;
  TimePoint now_{1s};
  std::uint32_t shift_ = 0;
  std::vector<float> rows_;
  const std::size_t row_bytes_;
  Bytes sent_rows_, frame_;
  std::vector<float> weights_, out_, sum_;
};

void measure_rounds(const char* name, int repeats, std::uint32_t n_rows, std::uint32_t width, bool sums) {
  Rounds rounds(n_rows, width, sums);
  measure(name, repeats, [&] { rounds.once(); });
}

}  // namespace
}  // namespace kvasir

int main() {
  using namespace kvasir;
  wire::use_checksum_kernels(wire::kBaselineChecksumKernels);
  measure_rows();
  measure_exec("encode exec, 1 row", "decode exec, 1 row", kRepeats, 1, kWidth);
  measure_exec("encode exec, 512 narrow rows", "decode exec, 512 narrow rows", kRepeatsOfPrompt, kPrompt, kPromptWidth);
  measure_result();
  measure_pong();
  measure_rounds("round of 1 row, exact", kRepeats, 1, kWidth, false);
  measure_rounds("round of 1 narrow row, exact", kRepeats, 1, kPromptWidth / 4, false);
  measure_rounds("round of 8 rows, exact", kRepeats, 8, kWidth, false);
  measure_rounds("round of 8 rows, f16 sums", kRepeats, 8, kWidth, true);
  measure_rounds("round of 512 narrow rows, exact", kRepeatsOfPrompt, kPrompt, kPromptWidth, false);
}
