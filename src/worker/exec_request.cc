#include "worker/exec_request.h"

#include <algorithm>
#include <cstring>
#include <format>

#include "base/check.h"
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
  cut_into_pieces();
  std::uint32_t longest = 0;
  for (std::uint32_t begin = 0; const std::uint32_t end : piece_ends_) {
    longest = std::max(longest, end - begin);
    begin = end;
  }
  out_.room_for(std::size_t{longest} * n_embd);
  if (sums) std::fill_n(sums_.room_for(n_rows * n_embd), n_rows * n_embd, 0.f);
  return std::nullopt;
}

// Whole experts only: a row's bits depend on how many rows its expert computes at once. Where an
// expert's pairs do not follow each other, the request is one piece.
void ExecRequest::cut_into_pieces() {
  const std::uint32_t n = view_.head.n_pairs;
  piece_ends_.clear();
  next_piece_ = 0;
  begin_ = end_ = 0;
  if (piece_pairs_ > 0 && n > piece_pairs_) {
    seen_.assign(bound_->layer->tensors.n_local, false);
    const ffn::LocalPair* pairs = pairs_.data();
    std::uint32_t begin = 0;
    for (std::uint32_t i = 0; i < n; ++i) {
      if (i > 0 && pairs[i].expert == pairs[i - 1].expert) continue;
      if (seen_[pairs[i].expert]) {
        piece_ends_.clear();
        break;
      }
      seen_[pairs[i].expert] = true;
      if (i - begin >= piece_pairs_) piece_ends_.push_back(begin = i);
    }
  }
  piece_ends_.push_back(n);
}

Status ExecRequest::compute(ffn::Engine& engine) {
  begin_ = end_;
  end_ = piece_ends_[next_piece_++];
  const std::span<const ffn::LocalPair> pairs(pairs_.data() + begin_, end_ - begin_);
  KVASIR_TRY(run(engine, view_.head.numerics, *bound_, rows_, pairs, out_.data()));
  if (view_.head.result_kind == ResultKind::kWeightedSum && !complete()) sum_weighted();
  return {};
}

Status ExecRequest::run(ffn::Engine& engine, wire::Numerics numerics, const BoundRecipe& bound, ffn::RowsView rows,
                        std::span<const ffn::LocalPair> pairs, float* out) {
  if (numerics == wire::Numerics::kFast) return engine.compute_fast(bound.recipe, bound.layer->copies, rows, pairs, out);
  return engine.compute(numerics, bound.recipe, bound.layer->tensors, rows, pairs, out);
}

Status ExecRequest::compute_together(ffn::Engine& engine, std::span<ExecRequest* const> requests, Batch& batch) {
  const ExecRequest& first = *requests.front();
  const std::size_t n_embd = first.view_.head.n_embd;
  std::uint32_t n_rows = 0, n_pairs = 0;
  for (const ExecRequest* request : requests) {
    KVASIR_CHECK(request->in_one_piece() && request->bound_->layer == first.bound_->layer &&
                 request->view_.head.numerics == first.view_.head.numerics);
    n_rows += request->view_.head.n_rows;
    n_pairs += request->view_.head.n_pairs;
  }
  float* rows = batch.rows.room_for(n_rows * n_embd);
  float* out = batch.out.room_for(n_pairs * n_embd);
  ffn::LocalPair* pairs = batch.pairs.room_for(n_pairs);
  std::uint32_t row = 0, pair = 0;
  for (const ExecRequest* request : requests) {
    const wire::ExecHead& head = request->view_.head;
    std::memcpy(rows + row * n_embd, request->rows_.data, head.n_rows * n_embd * sizeof(float));
    for (std::uint32_t i = 0; i < head.n_pairs; ++i)
      pairs[pair + i] = {request->pairs_.data()[i].row + row, request->pairs_.data()[i].expert};
    row += head.n_rows;
    pair += head.n_pairs;
  }
  KVASIR_TRY(run(engine, first.view_.head.numerics, *first.bound_, {rows, n_embd, n_rows}, {pairs, n_pairs}, out));
  pair = 0;
  for (ExecRequest* request : requests) {
    request->begin_ = 0;
    request->end_ = request->view_.head.n_pairs;
    request->next_piece_ = 1;
    std::memcpy(request->out_.data(), out + pair * n_embd, request->end_ * n_embd * sizeof(float));
    pair += request->end_;
  }
  return {};
}

std::uint32_t ExecRequest::answer_rows() const {
  return view_.head.result_kind == ResultKind::kWeightedSum ? view_.head.n_rows : view_.head.n_pairs;
}

std::size_t ExecRequest::experts() const {
  const ffn::LocalPair* pairs = pairs_.data();
  std::size_t n = 0;
  for (std::uint32_t i = 0; i < view_.head.n_pairs; ++i) n += i == 0 || pairs[i].expert != pairs[i - 1].expert;
  return n;
}

std::size_t ExecRequest::count_new_experts(std::vector<bool>& seen) const {
  seen.resize(bound_->layer->tensors.n_local);
  std::size_t n = 0;
  for (std::uint32_t i = 0; i < view_.head.n_pairs; ++i) {
    const auto expert = pairs_.data()[i].expert;
    n += !seen[expert];
    seen[expert] = true;
  }
  return n;
}

void ExecRequest::sum_weighted() {
  const std::size_t n_embd = view_.head.n_embd;
  float* sums = sums_.data();
  for (std::size_t i = begin_; i < end_; ++i) {
    const float weight = view_.weight(i);
    const float* row = out_.data() + (i - begin_) * n_embd;
    float* sum = sums + view_.pair(i).row * n_embd;
    for (std::size_t c = 0; c < n_embd; ++c) sum[c] += weight * row[c];
  }
}

ExecRequest::Rows ExecRequest::finish() {
  const std::size_t n_embd = view_.head.n_embd;
  const float* rows = out_.data();
  std::uint32_t first = begin_, n_rows = end_ - begin_;
  if (view_.head.result_kind == ResultKind::kWeightedSum) {
    if (!complete()) return {};
    sum_weighted();
    rows = sums_.data();
    first = 0;
    n_rows = view_.head.n_rows;
  }
  if (view_.head.result_type == RowType::kF32) return {first, n_rows, std::as_bytes(std::span(rows, n_rows * n_embd))};
  const std::size_t row_bytes = *wire::row_bytes(view_.head.result_type, view_.head.n_embd);  // decode_exec has asked
  std::byte* encoded = encoded_.room_for(n_rows * row_bytes);
  for (std::size_t i = 0; i < n_rows; ++i)
    wire::encode_row(view_.head.result_type, {rows + i * n_embd, n_embd}, {encoded + i * row_bytes, row_bytes});
  return {first, n_rows, {encoded, n_rows * row_bytes}};
}

void ExecRequest::release() {
  pairs_.trim(kScratchBytesKept);
  for (Scratch<float>* scratch : {&decoded_, &out_, &sums_}) scratch->trim(kScratchBytesKept);
  encoded_.trim(kScratchBytesKept);
  share_ = {};
}

}  // namespace kvasir::worker
