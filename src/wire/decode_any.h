// For tests and fuzzers: decode bytes that may be anything as a frame's payload, and check
// what every accepted message promises: it lies inside its limits and has one byte form.
#pragma once

#include <algorithm>

#include "base/check.h"
#include "wire/codec.h"

namespace kvasir::wire {

template <typename Message>
bool check_reencoded(const Result<Message>& message, ByteSpan payload) {
  if (!message) return false;
  KVASIR_CHECK(std::ranges::equal(encode(*message), payload));
  return true;
}

// Whether the payload is accepted as a message of this type. CHECKs the promises.
inline bool decode_any(FrameType type, ByteSpan payload) {
  switch (type) {
    case FrameType::kHello: return check_reencoded(decode_hello(payload), payload);
    case FrameType::kHoldings: {
      const auto holdings = decode_holdings(payload);
      if (!check_reencoded(holdings, payload)) return false;
      KVASIR_CHECK(holdings->entries.size() <= kHoldingsMax);
      for (const Holding& entry : holdings->entries) {
        KVASIR_CHECK(entry.experts.end() <= entry.n_expert && entry.n_expert <= kExpertsMax);
        KVASIR_CHECK(entry.experts.ranges().size() <= kRangesMax);
      }
      return true;
    }
    case FrameType::kLayerRecipe: {
      const auto recipe = decode_layer_recipe(payload);
      if (!check_reencoded(recipe, payload)) return false;
      KVASIR_CHECK(validate(recipe->recipe).has_value() && recipe->recipe_id < kRecipesMax);
      return true;
    }
    case FrameType::kExec: {
      const auto exec = decode_exec(payload);
      if (!exec) return false;
      const ExecHead& head = exec->head;
      const std::size_t row = row_bytes(head.row_type, head.n_embd).value();
      KVASIR_CHECK(exec->rows.size() == head.n_rows * row &&
                   exec->rows.data() + exec->rows.size() == payload.data() + payload.size());
      KVASIR_CHECK(exec->pairs.size() == head.n_pairs * kPairBytes);
      const std::size_t answer_rows = head.result_kind == ResultKind::kPerPair ? head.n_pairs : head.n_rows;
      KVASIR_CHECK(answer_rows * row_bytes(head.result_type, head.n_embd).value() <= kAnswerBytesMax);
      for (std::size_t i = 0; i < head.n_pairs; ++i)
        KVASIR_CHECK(exec->pair(i).row < head.n_rows && exec->pair(i).expert < kExpertsMax);
      return true;
    }
    case FrameType::kResult: {
      const auto result = decode_result(payload);
      if (!result) return false;
      const ResultHead& head = result->head;
      KVASIR_CHECK(result->rows.size() == head.n_rows * row_bytes(head.row_type, head.n_embd).value());
      KVASIR_CHECK(std::uint64_t{head.first_row} + head.n_rows <= head.total_rows && head.total_rows <= kExecPairsMax);
      return true;
    }
    case FrameType::kError: {
      const auto error = decode_error(payload);  // unknown codes are mapped, so it may differ
      if (!error) return false;
      KVASIR_CHECK(error->message.size() <= kTextBytesMax && decode_error(encode(*error)).value() == *error);
      return true;
    }
    case FrameType::kPing: return check_reencoded(decode_ping(payload), payload);
    case FrameType::kPong: return check_reencoded(decode_pong(payload), payload);
    case FrameType::kUpload: {
      const auto upload = decode_upload(payload);
      if (!upload) return false;
      KVASIR_CHECK(!upload->bytes.empty() && upload->bytes.size() <= kUploadChunkBytes &&
                   upload->bytes.data() + upload->bytes.size() == payload.data() + payload.size());
      KVASIR_CHECK(upload->head.offset + upload->bytes.size() <= upload->head.total_bytes &&
                   upload->head.total_bytes <= kUploadBytesMax);
      return true;
    }
    case FrameType::kCancel:
    case FrameType::kDrain: return payload.empty();
  }
  return false;
}

}  // namespace kvasir::wire
