#include "hub/core/coverage_grid.h"

#include <algorithm>

#include "base/check.h"

namespace kvasir::hub {

CoverageGrid::CoverageGrid(std::span<const std::uint32_t> n_expert, std::uint32_t target) : layers_(n_expert.size()) {
  for (std::size_t i = 0; i < layers_.size(); ++i) layers_[i].cells.assign(n_expert[i], Cell{.target = target});
}

template <typename Change>
void CoverageGrid::change(const Segments& segments, const Change& apply) {
  for (const Segment& s : segments) {
    KVASIR_CHECK(s.layer < layers_.size() && s.end <= layers_[s.layer].cells.size());
    Layer& layer = layers_[s.layer];
    layer.dirty = true;
    for (std::uint32_t e = s.begin; e < s.end; ++e) apply(layer.cells[e]);
  }
}

void CoverageGrid::add_held(const Segments& segments, std::uint32_t weight) {
  change(segments, [weight](Cell& cell) {
    ++cell.held;
    cell.weight += weight;
  });
}

void CoverageGrid::remove_held(const Segments& segments, std::uint32_t weight) {
  change(segments, [weight](Cell& cell) {
    KVASIR_CHECK(cell.held > 0 && cell.weight >= weight);
    --cell.held;
    cell.weight -= weight;
  });
}

void CoverageGrid::add_reserved(const Segments& segments) {
  change(segments, [](Cell& cell) {
    ++cell.reserved;
    cell.weight += kWeightUnit;
  });
}

void CoverageGrid::remove_reserved(const Segments& segments) {
  change(segments, [](Cell& cell) {
    KVASIR_CHECK(cell.reserved > 0 && cell.weight >= kWeightUnit);
    --cell.reserved;
    cell.weight -= kWeightUnit;
  });
}

void CoverageGrid::set_target(std::uint32_t layer, std::uint32_t expert, std::uint32_t target) {
  change({{layer, expert, expert + 1}}, [target](Cell& cell) { cell.target = target; });
}

const CoverageGrid::Layer& CoverageGrid::folded(std::uint32_t index) const {
  KVASIR_CHECK(index < layers_.size());
  Layer& layer = layers_[index];
  if (!layer.dirty) return layer;
  layer.runs.clear();
  layer.peak = 0;
  layer.deficit = 0;
  const auto& cells = layer.cells;
  for (std::uint32_t begin = 0, end = 0; begin < cells.size(); begin = end) {
    const Cell& cell = cells[begin];
    for (end = begin + 1; end < cells.size() && cells[end] == cell; ++end) {
    }
    const Run run{index, begin, end, cell.held, cell.reserved, cell.weight, cell.target};
    layer.runs.push_back(run);
    layer.peak = std::max(layer.peak, run.scarcity());
    const std::uint64_t wanted = std::uint64_t{run.target} * kWeightUnit;
    if (wanted > run.weight) layer.deficit += (wanted - run.weight) * run.size();
  }
  layer.dirty = false;
  return layer;
}

double CoverageGrid::peak() const {
  double peak = 0;
  for (std::uint32_t i = 0; i < n_layer(); ++i) peak = std::max(peak, folded(i).peak);
  return peak;
}

std::uint64_t CoverageGrid::deficit() const {
  std::uint64_t sum = 0;
  for (std::uint32_t i = 0; i < n_layer(); ++i) sum += folded(i).deficit;
  return sum;
}

bool CoverageGrid::is_surplus(const Segments& segments, std::uint32_t weight) const {
  for (const Segment& s : segments)
    for (std::uint32_t e = s.begin; e < s.end; ++e) {
      const Cell& cell = layers_[s.layer].cells[e];
      if (cell.weight < std::uint64_t{cell.target} * kWeightUnit + weight) return false;
    }
  return true;
}

}  // namespace kvasir::hub
