// One EXEC, from its payload to the rows of its answer. A long one is computed in pieces of
// whole experts, so that a piece can travel while the next is computed, and memory holds one
// piece. Sums and encoding of the last piece (finish) are done after the gate is left, so that
// another connection's request can run meanwhile.
//
// Buffers are kept between requests while they are small. One thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ffn/engine.h"
#include "wire/codec.h"
#include "worker/memory_budget.h"
#include "worker/slice_store.h"

namespace kvasir::worker {

struct BoundRecipe {
  wire::Recipe recipe;
  HeldLayerPtr layer;
};

// Uninitialised room for T, which grows and can be given back.
template <typename T>
class Scratch {
 public:
  T* room_for(std::size_t n) {
    if (n > capacity_) {
      data_.reset();
      data_ = std::make_unique_for_overwrite<T[]>(n);
      capacity_ = n;
    }
    return data_.get();
  }
  T* data() const { return data_.get(); }
  void trim(std::size_t bytes_kept) {
    if (capacity_ * sizeof(T) <= bytes_kept) return;
    data_.reset();
    capacity_ = 0;
  }

 private:
  std::unique_ptr<T[]> data_;
  std::size_t capacity_ = 0;
};

class ExecRequest {
 public:
  // `piece_pairs`: a piece has at least so many, but for the last; 0: no pieces.
  ExecRequest(MemoryBudget& budget, std::uint32_t piece_pairs) : budget_(budget), piece_pairs_(piece_pairs) {}

  // Checks the request against the layer and decodes rows that are not f32. `view` and
  // `bound` must stand until finish(). The refusal, if there is one.
  std::optional<wire::ErrorMessage> prepare(const wire::ExecView& view, const BoundRecipe& bound);
  // The expert FFN of the next piece's pairs. The caller has the gate's turn.
  Status compute(ffn::Engine& engine);
  bool complete() const { return next_piece_ == piece_ends_.size(); }  // nothing is left to compute
  // Rows of the answer that the last compute() has made ready, as they travel; none before the
  // end if rows are summed. They stand until the next compute(), prepare() or release().
  struct Rows {
    std::uint32_t first = 0;
    std::uint32_t count = 0;
    ByteSpan bytes;
  };
  Rows finish();
  std::uint32_t answer_rows() const;
  // Runs of pairs of one expert: how many experts it needs, as backbones send them, else more.
  std::size_t experts() const;
  // Those that are not in `seen` (by local id) yet, which takes them up.
  std::size_t count_new_experts(std::vector<bool>& seen) const;
  void release();

  // --- together with others of the same recipe, layer and class; none is longer than one piece ---
  // Instead of compute(): scratch memory is the batch's, which one computation at a time uses.
  struct Batch {
    Scratch<float> rows, out;
    Scratch<ffn::LocalPair> pairs;
  };
  static Status compute_together(ffn::Engine& engine, std::span<ExecRequest* const> requests, Batch& batch);
  bool in_one_piece() const { return piece_ends_.size() == 1; }

 private:
  static Status run(ffn::Engine& engine, wire::Numerics numerics, const BoundRecipe& bound, ffn::RowsView rows,
                    std::span<const ffn::LocalPair> pairs, float* out);
  void cut_into_pieces();
  void sum_weighted();

  MemoryBudget& budget_;
  const std::uint32_t piece_pairs_;
  MemoryBudget::Share share_;
  wire::ExecView view_;
  const BoundRecipe* bound_ = nullptr;
  ffn::RowsView rows_;
  Scratch<ffn::LocalPair> pairs_;
  std::vector<std::uint32_t> piece_ends_;  // piece i is the pairs [piece_ends_[i - 1], piece_ends_[i])
  std::size_t next_piece_ = 0;
  std::uint32_t begin_ = 0, end_ = 0;      // pairs of the piece computed last
  std::vector<bool> seen_;                 // experts, while pieces are cut
  Scratch<float> decoded_, out_, sums_;
  Scratch<std::byte> encoded_;
};

}  // namespace kvasir::worker
