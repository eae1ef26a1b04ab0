#include "worker/exec_request.h"

#include <algorithm>
#include <format>

#include "worker/limits.h"

namespace kvasir::worker {
namespace {

using wire::ErrorCode;
using wire::ErrorMessage;
using wire::ResultKind;
using wire::RowType;

}  // namespace

std::optional<ErrorMessage> ExecRequest::prepare(const wire::ExecView& view, const BoundRecipe& bound) {
  const wire::ExecHead& head = view.head;
  const HeldLayer& layer = *bound.layer;
  if (head.n_embd != bound.recipe.n_embd)
    return ErrorMessage{ErrorCode::kUnsupportedRecipe, std::format("The rows have {} values, but the recipe has {}.",
                                                                   head.n_embd, bound.recipe.n_embd)};
  // decode_exec bounds every count: no product here can wrap.
  const std::uint64_t n_embd = head.n_embd, n_rows = head.n_rows, n_pairs = head.n_pairs;
  const bool sums = head.result_kind == ResultKind::kWeightedSum;
  std::uint64_t bytes = n_pairs * (sizeof(ffn::LocalPair) + n_embd * sizeof(float));
  if (head.row_type != RowType::kF32) bytes += n_rows * n_embd * sizeof(float);
  if (sums) bytes += n_rows * n_embd * sizeof(float);
  if (head.result_type != RowType::kF32) bytes += (sums ? n_rows : n_pairs) * n_embd * sizeof(float);
  share_ = budget_.take(bytes);
  if (!share_)
    return ErrorMessage{ErrorCode::kBusy, std::format("There is no memory for the {} MiB of this request now: try a "
                                                      "replica or send fewer pairs at once.", (bytes >> 20) + 1)};

  ffn::LocalPair* pairs = pairs_.room_for(n_pairs);
  for (std::size_t i = 0; i < n_pairs; ++i) {
    const wire::Pair pair = view.pair(i);
    const std::int32_t local = pair.expert < layer.local_of.size() ? layer.local_of[pair.expert] : -1;
    if (local < 0)
      return ErrorMessage{ErrorCode::kExpertNotHeld,
                          std::format("Expert {} of layer {} is not held here.", pair.expert, layer.layer)};
    pairs[i] = {pair.row, static_cast<std::uint32_t>(local)};
  }

  const float* rows = nullptr;
  if (head.row_type == RowType::kF32) {
    rows = reinterpret_cast<const float*>(view.rows.data());  // aligned to 4: see ExecView
  } else {
    float* decoded = decoded_.room_for(n_rows * n_embd);
    const std::size_t row_bytes = view.rows.size() / n_rows;
    for (std::size_t i = 0; i < n_rows; ++i)
      wire::decode_row(head.row_type, view.rows.subspan(i * row_bytes, row_bytes), {decoded + i * n_embd, n_embd});
    rows = decoded;
  }
  view_ = view;
  bound_ = &bound;
  rows_ = {rows, n_embd, head.n_rows};
  out_.room_for(n_pairs * n_embd);
  return std::nullopt;
}

Status ExecRequest::compute(ffn::Engine& engine) {
  return engine.compute(view_.head.numerics, bound_->recipe, bound_->layer->tensors, rows_,
                        {pairs_.data(), view_.head.n_pairs}, out_.data());
}

std::uint32_t ExecRequest::answer_rows() const {
  return view_.head.result_kind == ResultKind::kWeightedSum ? view_.head.n_rows : view_.head.n_pairs;
}

void ExecRequest::sum_weighted() {
  const std::size_t n_embd = view_.head.n_embd;
  float* sums = sums_.room_for(view_.head.n_rows * n_embd);
  std::fill_n(sums, view_.head.n_rows * n_embd, 0.f);
  for (std::size_t i = 0; i < view_.head.n_pairs; ++i) {
    const float weight = view_.weight(i);
    const float* row = out_.data() + i * n_embd;
    float* sum = sums + view_.pair(i).row * n_embd;
    for (std::size_t c = 0; c < n_embd; ++c) sum[c] += weight * row[c];
  }
}

ByteSpan ExecRequest::finish() {
  const std::size_t n_embd = view_.head.n_embd, n_rows = answer_rows();
  const float* rows = out_.data();
  if (view_.head.result_kind == ResultKind::kWeightedSum) {
    sum_weighted();
    rows = sums_.data();
  }
  if (view_.head.result_type == RowType::kF32) return std::as_bytes(std::span(rows, n_rows * n_embd));
  const std::size_t row_bytes = *wire::row_bytes(view_.head.result_type, view_.head.n_embd);  // decode_exec has asked
  std::byte* encoded = encoded_.room_for(n_rows * row_bytes);
  for (std::size_t i = 0; i < n_rows; ++i)
    wire::encode_row(view_.head.result_type, {rows + i * n_embd, n_embd}, {encoded + i * row_bytes, row_bytes});
  return {encoded, n_rows * row_bytes};
}

void ExecRequest::release() {
  pairs_.trim(kScratchBytesKept);
  for (Scratch<float>* scratch : {&decoded_, &out_, &sums_}) scratch->trim(kScratchBytesKept);
  encoded_.trim(kScratchBytesKept);
  share_ = {};
}

}  // namespace kvasir::worker
