#include "hub/core/segments.h"

#include <algorithm>

#include "base/check.h"

namespace kvasir::hub {

Segments normalize(std::vector<Segment> segments) {
  std::erase_if(segments, [](const Segment& s) { return s.begin >= s.end; });
  std::ranges::sort(segments);
  std::size_t kept = 0;
  for (const Segment& s : segments) {
    if (kept > 0 && segments[kept - 1].layer == s.layer && s.begin <= segments[kept - 1].end) {
      segments[kept - 1].end = std::max(segments[kept - 1].end, s.end);
    } else {
      segments[kept++] = s;
    }
  }
  segments.resize(kept);
  return segments;
}

std::uint64_t count_experts(std::span<const Segment> segments) {
  std::uint64_t n = 0;
  for (const Segment& s : segments) n += s.size();
  return n;
}

bool contains(std::span<const Segment> segments, std::uint32_t layer, std::uint32_t expert) {
  // The last segment that begins at or before the expert.
  auto after = std::ranges::upper_bound(segments, Segment{layer, expert, UINT32_MAX});
  if (after == segments.begin()) return false;
  const Segment& s = *--after;
  return s.layer == layer && expert < s.end;
}

Segments intersect(const Segments& a, const Segments& b) {
  Segments out;
  for (auto i = a.begin(), j = b.begin(); i != a.end() && j != b.end();) {
    if (i->layer == j->layer) {
      const std::uint32_t begin = std::max(i->begin, j->begin), end = std::min(i->end, j->end);
      if (begin < end) out.push_back({i->layer, begin, end});
    }
    // Whichever ends first can meet nothing more.
    if (std::pair(i->layer, i->end) < std::pair(j->layer, j->end)) {
      ++i;
    } else {
      ++j;
    }
  }
  return out;
}

Segments subtract(const Segments& a, const Segments& b) {
  Segments out;
  auto j = b.begin();
  for (Segment s : a) {
    while (j != b.end() && std::pair(j->layer, j->end) <= std::pair(s.layer, s.begin)) ++j;
    for (auto k = j; k != b.end() && k->layer == s.layer && k->begin < s.end; ++k) {
      if (s.begin < k->begin) out.push_back({s.layer, s.begin, k->begin});
      s.begin = std::min(std::max(s.begin, k->end), s.end);
    }
    if (s.begin < s.end) out.push_back(s);
  }
  return out;
}

Cell nth_expert(std::span<const Segment> segments, std::uint64_t index) {
  for (const Segment& s : segments) {
    if (index < s.size()) return {s.layer, s.begin + static_cast<std::uint32_t>(index)};
    index -= s.size();
  }
  KVASIR_CHECK(false);  // the index is below count_experts()
  return {};
}

}  // namespace kvasir::hub
