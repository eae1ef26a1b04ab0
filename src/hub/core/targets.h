// How many replicas each expert should have: a base, more for experts that are used more
// than their layer's average, more for all when the backbones report busy workers. Raised
// quickly and lowered slowly, with a gap between the two thresholds, so that nothing thrashes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "hub/core/coverage_grid.h"

namespace kvasir::hub {

inline constexpr std::uint32_t kHeatExtraMax = 4;        // replicas above the base for heat
inline constexpr std::uint32_t kSaturationExtraMax = 4;  // and for saturation
inline constexpr std::uint32_t kTargetMax = 1024;        // of the base
inline constexpr Nanos kTargetUpdateInterval = std::chrono::seconds(30);
inline constexpr Nanos kHeatHalfLife = std::chrono::minutes(10);
inline constexpr Nanos kTargetLowerDelay = std::chrono::minutes(10);

class Targets {
 public:
  Targets(std::span<const std::uint32_t> n_expert, std::uint32_t base);

  // Uses of each expert of a layer since the last report; counts beyond the layer's experts
  // are ignored.
  void report_heat(std::uint32_t layer, std::span<const std::uint64_t> uses);
  // Share of one backbone's last rounds in which workers were too busy, 0…1. Backbones report
  // more often than kTargetUpdateInterval; the busiest counts.
  void report_saturation(double share);

  // Cheap until kTargetUpdateInterval has passed; then recomputes and writes what changed.
  void update(TimePoint now, CoverageGrid& grid);

  std::uint32_t base() const { return base_; }
  std::uint32_t saturation_extra() const { return saturation_extra_; }

 private:
  struct Cell {
    double heat = 0;  // decayed uses
    std::uint32_t extra = 0;
    TimePoint raised{};
  };

  bool update_layer(std::vector<Cell>& cells, double decay, TimePoint now);
  bool update_saturation(TimePoint now);

  std::uint32_t base_;
  std::vector<std::vector<Cell>> layers_;
  std::optional<TimePoint> updated_;
  double saturation_ = 0;  // the largest of those reported since the last update
  std::optional<TimePoint> saturated_since_, idle_since_;
  std::uint32_t saturation_extra_ = 0;
};

}  // namespace kvasir::hub
