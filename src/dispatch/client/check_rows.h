// The rows of spot checks, beside the round's own: compared as the numeric class demands, and
// what was wrong told in the log.
#pragma once

#include <span>
#include <vector>

#include "dispatch/client/shared.h"
#include "dispatch/core/spot_check.h"

namespace kvasir::dispatch {

// Two rows of `n` finite values as answers to the same pair. Exact and invariant: the same
// bits. Fast: other kernels and narrower rows on the way are honest; see the constants in .cc.
bool rows_agree(wire::Numerics numerics, const float* a, const float* b, std::size_t n);

class CheckRows final : public CheckedRows {
 public:
  explicit CheckRows(Shared& shared) : shared_(shared) {}

  void begin_round(const Round& round);
  // Room for so many rows; what lies there is kept.
  void grow(std::uint32_t slots);
  std::span<float> row(std::uint32_t slot) { return {rows_.data() + slot * n_embd_, n_embd_}; }

  bool answer_agrees(std::uint32_t pair, std::uint32_t slot) const override;
  bool slots_agree(std::uint32_t a, std::uint32_t b) const override;
  void lie_found(const Evidence& evidence) override;
  void replace_answer(std::uint32_t pair, std::uint32_t slot) override;

 private:
  Shared& shared_;
  const Round* round_ = nullptr;
  std::size_t n_embd_ = 0;
  std::vector<float> rows_;
  std::vector<WorkerIndex> told_;  // of this round: one line for each worker
};

}  // namespace kvasir::dispatch
