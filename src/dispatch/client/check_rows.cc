#include "dispatch/client/check_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <format>

namespace kvasir::dispatch {
namespace {

// In fast, honest answers differ by kernels (cosine 0.998 at worst, wide MMQ on CUDA) and by
// rows of f16 or q8 on the way (0.9999); a norm that is off by 5 % must be seen.
constexpr double kFastCosineMin = 0.995;
constexpr double kFastNormRatioMax = 1.03;
// Rows this much smaller than an f16 subnormal's step are equal to zero on the wire.
constexpr double kFastNormZero = 1e-6;

}  // namespace

bool rows_agree(wire::Numerics numerics, const float* a, const float* b, std::size_t n) {
  if (numerics != wire::Numerics::kFast) return std::memcmp(a, b, n * sizeof(float)) == 0;
  double aa = 0, bb = 0, ab = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double x = a[i], y = b[i];
    aa += x * x;
    bb += y * y;
    ab += x * y;
  }
  const double norm_a = std::sqrt(aa), norm_b = std::sqrt(bb);
  if (std::max(norm_a, norm_b) <= kFastNormZero * std::sqrt(static_cast<double>(n))) return true;
  if (std::max(norm_a, norm_b) > kFastNormRatioMax * std::min(norm_a, norm_b)) return false;
  return ab >= kFastCosineMin * norm_a * norm_b;
}

void CheckRows::begin_round(const Round& round) {
  round_ = &round;
  n_embd_ = round.layer->recipe.n_embd;
  told_.clear();
}

void CheckRows::grow(std::uint32_t slots) {
  const std::size_t values = std::size_t{slots} * n_embd_;
  if (rows_.size() < values) rows_.resize(values);
}

bool CheckRows::answer_agrees(std::uint32_t pair, std::uint32_t slot) const {
  return rows_agree(shared_.options.numerics, round_->out + pair * n_embd_, rows_.data() + slot * n_embd_, n_embd_);
}

bool CheckRows::slots_agree(std::uint32_t a, std::uint32_t b) const {
  return rows_agree(shared_.options.numerics, rows_.data() + a * n_embd_, rows_.data() + b * n_embd_, n_embd_);
}

void CheckRows::lie_found(const Evidence& evidence) {
  if (std::ranges::contains(told_, evidence.worker)) return;
  told_.push_back(evidence.worker);
  const wire::Pair pair = round_->pairs[evidence.pair];
  const float* answer = round_->out + evidence.pair * n_embd_;
  const float* right = rows_.data() + evidence.slot * n_embd_;
  std::size_t worst = 0;
  for (std::size_t i = 1; i < n_embd_; ++i)
    if (std::abs(answer[i] - right[i]) > std::abs(answer[worst] - right[worst])) worst = i;
  const std::string judge = evidence.judge == kComputedHere ? "this machine" : "worker " + shared_.name(evidence.judge);
  // Where a first opinion was the wrong one, the answer that stands is the right one.
  const std::string values = worst < n_embd_ && answer[worst] != right[worst]
                                 ? std::format(": value {} is {} and should be {}", worst, answer[worst], right[worst])
                                 : std::string();
  shared_.log(std::format("worker {} gave a wrong answer in layer {}, expert {}{} (computed again by {}); it is not asked for an hour or more.",
                   shared_.name(evidence.worker), round_->layer->layer, pair.expert, values, judge));
}

void CheckRows::replace_answer(std::uint32_t pair, std::uint32_t slot) {
  std::memcpy(round_->out + pair * n_embd_, rows_.data() + slot * n_embd_, n_embd_ * sizeof(float));
}

}  // namespace kvasir::dispatch
