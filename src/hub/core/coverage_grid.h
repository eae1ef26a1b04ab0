// How well each (layer, expert) of one model is covered: replicas held and reserved, against
// a target. Folded on demand into runs of equal cells, cached per layer, so that a question
// costs a walk over the layers that changed since the last one.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "hub/core/segments.h"

namespace kvasir::hub {

// A node of ordinary speed is worth kWeightUnit; a slow one less. Four steps are enough: a
// replica is there to answer in time, and either it does or it does only partly.
inline constexpr std::uint32_t kWeightUnit = 4;

inline double scarcity(double replicas, double target) {
  if (target <= 0 || replicas >= target) return 0;
  return (target - replicas) / target;
}

// Neighbouring experts in the same state.
struct Run {
  std::uint32_t layer = 0;
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
  std::uint32_t held = 0;
  std::uint32_t reserved = 0;  // promised to nodes that are fetching them
  std::uint32_t weight = 0;    // of all of these, in 1/kWeightUnit replicas
  std::uint32_t target = 0;
  std::uint32_t size() const { return end - begin; }
  std::uint32_t replicas() const { return held + reserved; }
  friend bool operator==(const Run&, const Run&) = default;
  double scarcity() const { return hub::scarcity(weight / static_cast<double>(kWeightUnit), target); }
};

class CoverageGrid {
 public:
  // n_expert of each layer; 0 for a dense one. Every cell starts at `target`.
  CoverageGrid(std::span<const std::uint32_t> n_expert, std::uint32_t target);

  std::uint32_t n_layer() const { return static_cast<std::uint32_t>(layers_.size()); }
  std::uint32_t n_expert(std::uint32_t layer) const { return static_cast<std::uint32_t>(layers_[layer].cells.size()); }

  // Segments must lie inside the model; remove only what was added, with the same weight.
  void add_held(const Segments& segments, std::uint32_t weight);
  void remove_held(const Segments& segments, std::uint32_t weight);
  void add_reserved(const Segments& segments);
  void remove_reserved(const Segments& segments);
  void set_target(std::uint32_t layer, std::uint32_t expert, std::uint32_t target);

  // In order; valid until the next change.
  const std::vector<Run>& runs(std::uint32_t layer) const { return folded(layer).runs; }
  // The largest scarcity of the layer and of the model.
  double peak(std::uint32_t layer) const { return folded(layer).peak; }
  double peak() const;
  // Replicas missing over all cells, in 1/kWeightUnit.
  std::uint64_t deficit() const;
  // Whether every cell would still reach its target without `weight` on these segments.
  bool is_surplus(const Segments& segments, std::uint32_t weight) const;

 private:
  struct Cell {
    std::uint32_t held = 0;
    std::uint32_t reserved = 0;
    std::uint32_t weight = 0;
    std::uint32_t target = 0;
    friend bool operator==(const Cell&, const Cell&) = default;
  };
  struct Layer {
    std::vector<Cell> cells;
    // Of `cells`, while not dirty:
    std::vector<Run> runs;
    double peak = 0;
    std::uint64_t deficit = 0;
    bool dirty = true;
  };

  template <typename Change>
  void change(const Segments& segments, const Change& apply);
  const Layer& folded(std::uint32_t layer) const;

  mutable std::vector<Layer> layers_;
};

}  // namespace kvasir::hub
