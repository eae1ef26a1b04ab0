// An ordered set of expert ids within one layer, kept as half-open ranges.
// A slice stores, per layer, such a set; an expert's local id is its rank in it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"

namespace kvasir {

struct Range {  // [begin, end)
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
  friend bool operator==(const Range&, const Range&) = default;
};

class ExpertSet {
 public:
  ExpertSet() = default;
  static ExpertSet all(std::uint32_t n_expert) {
    ExpertSet set;
    if (n_expert > 0) set.ranges_.push_back({0, n_expert});
    return set;
  }
  // `ids` need not be sorted; duplicates count once.
  static ExpertSet from_ids(std::vector<std::uint32_t> ids);

  // Adds [begin, end); overlapping and touching ranges are merged.
  void add(Range range);

  bool empty() const { return ranges_.empty(); }
  std::uint32_t size() const;
  bool contains(std::uint32_t id) const { return rank(id).has_value(); }
  // How many ids of the set are smaller: the local id. nullopt if `id` is not in the set.
  std::optional<std::uint32_t> rank(std::uint32_t id) const;
  std::vector<std::uint32_t> ids() const;  // ascending
  const std::vector<Range>& ranges() const { return ranges_; }
  std::uint32_t end() const { return ranges_.empty() ? 0 : ranges_.back().end; }  // largest id + 1

  friend bool operator==(const ExpertSet&, const ExpertSet&) = default;

 private:
  std::vector<Range> ranges_;  // sorted, disjoint, not touching, none empty
};

// "3,7,9:12" -> {3,7,9,10,11}; ":" or "all" is everything in [0, limit). `what` ("expert",
// "layer") names the thing in errors. Refuses empty and reversed ranges and ids >= limit.
Result<ExpertSet> parse_ranges(std::string_view text, std::uint32_t limit, std::string_view what);
// "3,7,9:12", the shortest form parse_ranges reads back.
std::string format_ranges(const ExpertSet& set);

}  // namespace kvasir
