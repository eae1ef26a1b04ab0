#include "hub/core/targets.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace kvasir::hub {
namespace {

// One replica more at twice the layer's average use, two at four times, and so on; the
// margins on either side are the hysteresis.
constexpr double kRaiseMargin = 1.1;
constexpr double kLowerMargin = 0.7;
// Fewer decayed uses than this in a layer say nothing about its experts.
constexpr double kEvidenceMin = 1000;

constexpr double kSaturatedShare = 0.8;
constexpr double kIdleShare = 0.4;
constexpr Nanos kSaturatedFor = std::chrono::minutes(1);
constexpr Nanos kIdleFor = std::chrono::minutes(20);

}  // namespace

Targets::Targets(std::span<const std::uint32_t> n_expert, std::uint32_t base) : base_(base), layers_(n_expert.size()) {
  for (std::size_t i = 0; i < layers_.size(); ++i) layers_[i].resize(n_expert[i]);
}

void Targets::report_heat(std::uint32_t layer, std::span<const std::uint64_t> uses) {
  if (layer >= layers_.size()) return;
  auto& cells = layers_[layer];
  for (std::size_t e = 0; e < std::min(uses.size(), cells.size()); ++e) cells[e].heat += static_cast<double>(uses[e]);
}

void Targets::report_saturation(double share) {
  if (!std::isfinite(share)) return;
  saturation_ = std::max(saturation_, std::clamp(share, 0.0, 1.0));
}

void Targets::update(TimePoint now, CoverageGrid& grid) {
  if (!updated_) updated_ = now;
  const Nanos passed = now - *updated_;
  if (passed < kTargetUpdateInterval) return;
  updated_ = now;
  const double decay = std::exp2(-static_cast<double>(passed.count()) / static_cast<double>(kHeatHalfLife.count()));
  const bool all = update_saturation(now);
  for (std::uint32_t layer = 0; layer < layers_.size(); ++layer) {
    if (!update_layer(layers_[layer], decay, now) && !all) continue;
    for (std::uint32_t e = 0; e < layers_[layer].size(); ++e)
      grid.set_target(layer, e, base_ + layers_[layer][e].extra + saturation_extra_);
  }
}

bool Targets::update_layer(std::vector<Cell>& cells, double decay, TimePoint now) {
  double total = 0;
  for (Cell& cell : cells) total += cell.heat *= decay;
  if (cells.empty()) return false;
  const bool evidence = total >= kEvidenceMin;
  const double mean = total / static_cast<double>(cells.size());
  bool changed = false;
  for (Cell& cell : cells) {
    const double ratio = evidence ? cell.heat / mean : 0;
    const std::uint32_t before = cell.extra;
    while (cell.extra < kHeatExtraMax && ratio >= std::exp2(cell.extra + 1.0) * kRaiseMargin) {
      ++cell.extra;
      cell.raised = now;
    }
    // One step at a time, and never soon after a raise.
    if (cell.extra == before && cell.extra > 0 && ratio < std::exp2(cell.extra) * kLowerMargin &&
        now - cell.raised >= kTargetLowerDelay) {
      --cell.extra;
      cell.raised = now;
    }
    changed |= cell.extra != before;
  }
  return changed;
}

bool Targets::update_saturation(TimePoint now) {
  const double share = std::exchange(saturation_, 0);  // the next interval's reports start afresh
  if (share < kSaturatedShare) saturated_since_.reset();
  if (share >= kIdleShare) idle_since_.reset();
  const std::uint32_t before = saturation_extra_;
  if (share >= kSaturatedShare) {
    if (!saturated_since_) saturated_since_ = now;
    if (now - *saturated_since_ >= kSaturatedFor && saturation_extra_ < kSaturationExtraMax) {
      ++saturation_extra_;
      saturated_since_ = now;
    }
  } else if (share < kIdleShare) {
    if (!idle_since_) idle_since_ = now;
    if (now - *idle_since_ >= kIdleFor && saturation_extra_ > 0) {
      --saturation_extra_;
      idle_since_ = now;
    }
  }
  return saturation_extra_ != before;
}

}  // namespace kvasir::hub
