// What a node holds: experts of several layers, as sorted half-open ranges.
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <vector>

namespace kvasir::hub {

struct Segment {  // experts [begin, end) of one layer
  std::uint32_t layer = 0;
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
  std::uint32_t size() const { return end - begin; }
  friend auto operator<=>(const Segment&, const Segment&) = default;
};

// Sorted by (layer, begin); ranges of a layer neither overlap nor touch; none is empty.
using Segments = std::vector<Segment>;

// Any order, overlaps and empty ranges allowed.
Segments normalize(std::vector<Segment> segments);

std::uint64_t count_experts(std::span<const Segment> segments);
bool contains(std::span<const Segment> segments, std::uint32_t layer, std::uint32_t expert);

Segments intersect(const Segments& a, const Segments& b);
Segments subtract(const Segments& a, const Segments& b);  // what is in a and not in b
inline bool is_subset(const Segments& a, const Segments& b) { return subtract(a, b).empty(); }

// The `index`-th (layer, expert) in order; index < count_experts(segments).
struct Cell {
  std::uint32_t layer = 0;
  std::uint32_t expert = 0;
};
Cell nth_expert(std::span<const Segment> segments, std::uint64_t index);

}  // namespace kvasir::hub
