// What a node's measured speed is worth, relative to the others: half the median or more is a
// full replica, less counts for less. Speeds live in half-octave bins, so that the median
// costs a walk over a few dozen counters whatever the number of nodes.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "hub/core/coverage_grid.h"

namespace kvasir::hub {

class SpeedScale {
 public:
  // `speed` in rows a second; 0 or not finite: unknown.
  void add(double speed) { count(speed, 1); }
  void remove(double speed) { count(speed, -1); }

  // 0 while fewer than kNodesMin speeds are known: nothing to compare with.
  double median() const {
    if (total_ < kNodesMin) return 0;
    std::int64_t before = 0;
    for (std::size_t i = 0; i < bins_.size(); ++i) {
      before += bins_[i];
      if (2 * before >= total_) return std::exp2((static_cast<double>(i) + 0.5) / kBinsPerOctave);
    }
    return 0;
  }

  // In 1/kWeightUnit. `current` is the node's weight until now: it changes only when the
  // speed is clearly past a boundary, so that a noisy measurement does not flap.
  std::uint32_t weigh(double speed, std::uint32_t current) const {
    const double typical = median();
    if (typical == 0 || !known(speed)) return kWeightUnit;
    const double ratio = speed / typical;
    const std::uint32_t up = step(ratio / kMargin), down = step(ratio * kMargin);
    return std::clamp(current, up, down);
  }

 private:
  static constexpr double kBinsPerOctave = 2;
  static constexpr std::size_t kBins = 64;  // 1 to 2^32 rows a second
  static constexpr std::int64_t kNodesMin = 3;
  static constexpr double kMargin = 1.15;

  static bool known(double speed) { return std::isfinite(speed) && speed > 0; }
  static std::uint32_t step(double ratio) {
    if (ratio >= 0.5) return kWeightUnit;
    return ratio >= 0.25 ? kWeightUnit / 2 : kWeightUnit / 4;
  }
  void count(double speed, int sign) {
    if (!known(speed)) return;
    const double bin = std::floor(std::log2(std::max(speed, 1.0)) * kBinsPerOctave);
    bins_[std::min(static_cast<std::size_t>(bin), kBins - 1)] += sign;
    total_ += sign;
  }

  std::array<std::int64_t, kBins> bins_{};
  std::int64_t total_ = 0;
};

}  // namespace kvasir::hub
