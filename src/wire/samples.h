// For tests: one frame of each kind. docs/protocol.md prints the same bytes.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "wire/codec.h"

namespace kvasir::wire {

struct SampleFrame {
  std::string name;
  Bytes bytes;
};

template <std::size_t N>
std::array<std::byte, N> counting_bytes(unsigned first) {
  std::array<std::byte, N> out;
  for (std::size_t i = 0; i < N; ++i) out[i] = static_cast<std::byte>(first + i);
  return out;
}

inline Hello sample_hello() {
  return {.protocol_version = kProtocolVersion,
          .role = Role::kBackbone,
          .numerics = Numerics::kExact,
          .software = "kvasir 0.1.0",
          .numerics_id = {.ggml_version = "0.27.0", .cpu_variant = "haswell", .probe = counting_bytes<32>(0)},
          .token = "t0ken"};
}

inline Holdings sample_holdings() {
  ExpertSet experts;
  experts.add({0, 16});
  experts.add({20, 21});
  return {.entries = {{.layer_id = counting_bytes<32>(0x20),
                       .layer = 7,
                       .group = ExpertGroup::kExps,
                       .n_expert = 256,
                       .n_embd = 2048,
                       .experts = experts}},
          .upload_bytes_free = 3ull << 30};
}

inline LayerRecipe sample_recipe() {
  Recipe recipe;
  recipe.activation = Activation::kSwigluOai;
  recipe.gate_bias = recipe.up_bias = recipe.down_bias = true;
  recipe.alpha = 1.702f;
  recipe.limit = 7;
  recipe.n_embd = recipe.n_ff = 2880;
  recipe.n_expert = 32;
  return {.recipe_id = 3, .layer_id = counting_bytes<32>(0x20), .recipe = recipe};
}

inline Bytes with_rows(Bytes prefix, const Bytes& rows) {
  std::ranges::copy(rows, std::back_inserter(prefix));
  return prefix;
}

inline Bytes rows_of(RowType type, std::uint32_t n_embd, std::vector<float> values) {
  const std::size_t row = *row_bytes(type, n_embd);
  Bytes out(row * (values.size() / n_embd));
  for (std::size_t r = 0; r * n_embd < values.size(); ++r)
    encode_row(type, std::span(values).subspan(r * n_embd, n_embd), std::span(out).subspan(r * row, row));
  return out;
}

inline Bytes sample_exec() {
  const Pair pairs[] = {{0, 5}, {0, 9}};
  const ExecHead head{.recipe_id = 3, .n_rows = 1, .n_pairs = 2, .n_embd = 2};
  const Bytes rows = rows_of(RowType::kF32, 2, {1.0f, -2.0f});
  return with_rows(*encode_exec_prefix(42, head, pairs, {}, rows, true), rows);
}

inline Bytes sample_exec_fast() {
  const Pair pairs[] = {{0, 5}, {1, 5}, {1, 200}};
  const float weights[] = {1.0f, 0.75f, 0.25f};
  const ExecHead head{.recipe_id = 3,
                      .numerics = Numerics::kFast,
                      .row_type = RowType::kF16,
                      .result_type = RowType::kBF16,
                      .result_kind = ResultKind::kWeightedSum,
                      .n_rows = 2,
                      .n_pairs = 3,
                      .n_embd = 2};
  const Bytes rows = rows_of(RowType::kF16, 2, {1.0f, -2.0f, 0.5f, 65504.0f});
  return with_rows(*encode_exec_prefix(43, head, pairs, weights, rows, false), rows);
}

inline Bytes sample_result() {
  const ResultHead head{
      .row_type = RowType::kF32, .n_embd = 2, .first_row = 0, .n_rows = 1, .total_rows = 2, .compute_us = 250};
  const Bytes rows = rows_of(RowType::kF32, 2, {0.5f, 3.0f});
  return with_rows(encode_result_prefix(42, head, rows, true, true), rows);
}

inline Bytes sample_upload() {
  const Bytes bytes = {std::byte{0x47}, std::byte{0x47}, std::byte{0x55}, std::byte{0x46}};
  return with_rows(encode_upload_prefix(45, {.total_bytes = 4096, .offset = 0}, bytes, true), bytes);
}

inline std::vector<SampleFrame> sample_frames() {
  return {
      {"HELLO", encode_frame(FrameType::kHello, 0, sample_hello(), true)},
      {"HOLDINGS", encode_frame(FrameType::kHoldings, 0, sample_holdings(), true)},
      {"LAYER_RECIPE", encode_frame(FrameType::kLayerRecipe, 0, sample_recipe(), true)},
      {"EXEC", sample_exec()},
      {"EXEC-fast", sample_exec_fast()},
      {"RESULT", sample_result()},
      {"ERROR",
       encode_frame(FrameType::kError, 42, ErrorMessage{ErrorCode::kBusy, "the queue is full; ask a replica."}, true)},
      {"CANCEL", encode_empty_frame(FrameType::kCancel, 42)},
      {"PING", encode_frame(FrameType::kPing, 44, Ping{.sent_ns = 1'000'000'007}, true)},
      {"PONG",
       encode_frame(
           FrameType::kPong, 44,
           Pong{.sent_ns = 1'000'000'007, .queued = 2, .wait_us = 4800, .busy_permille = 950, .row_us = 180},
           true)},
      {"DRAIN", encode_empty_frame(FrameType::kDrain, 0)},
      {"UPLOAD", sample_upload()},
  };
}

}  // namespace kvasir::wire
