#include "base/expert_set.h"

#include <charconv>
#include <format>

namespace kvasir {
namespace {

std::optional<std::uint32_t> parse_id(std::string_view text) {
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return value;
}

}  // namespace

ExpertSet ExpertSet::from_ids(std::vector<std::uint32_t> ids) {
  std::ranges::sort(ids);
  ExpertSet set;
  for (std::uint32_t id : ids) {
    if (!set.ranges_.empty() && id < set.ranges_.back().end) continue;
    if (!set.ranges_.empty() && id == set.ranges_.back().end) {
      ++set.ranges_.back().end;
    } else {
      set.ranges_.push_back({id, id + 1});
    }
  }
  return set;
}

void ExpertSet::add(Range range) {
  if (range.begin >= range.end) return;
  if (ranges_.empty() || range.begin > ranges_.back().end) {  // ascending input, as peers send it, stays linear
    ranges_.push_back(range);
    return;
  }
  std::vector<Range> merged;
  bool placed = false;
  for (const Range& r : ranges_) {
    if (r.end < range.begin) {
      merged.push_back(r);
    } else if (range.end < r.begin) {
      if (!placed) merged.push_back(range);
      placed = true;
      merged.push_back(r);
    } else {
      range = {std::min(range.begin, r.begin), std::max(range.end, r.end)};
    }
  }
  if (!placed) merged.push_back(range);
  ranges_ = std::move(merged);
}

std::uint32_t ExpertSet::size() const {
  std::uint32_t n = 0;
  for (const Range& r : ranges_) n += r.end - r.begin;
  return n;
}

std::optional<std::uint32_t> ExpertSet::rank(std::uint32_t id) const {
  std::uint32_t before = 0;
  for (const Range& r : ranges_) {
    if (id < r.begin) return std::nullopt;
    if (id < r.end) return before + (id - r.begin);
    before += r.end - r.begin;
  }
  return std::nullopt;
}

std::vector<std::uint32_t> ExpertSet::ids() const {
  std::vector<std::uint32_t> out;
  out.reserve(size());
  for (const Range& r : ranges_)
    for (std::uint32_t id = r.begin; id < r.end; ++id) out.push_back(id);
  return out;
}

Result<ExpertSet> parse_ranges(std::string_view text, std::uint32_t limit, std::string_view what) {
  if (text == ":" || text == "all") return ExpertSet::all(limit);
  ExpertSet set;
  std::string_view rest = text;
  while (true) {
    const std::size_t comma = rest.find(',');
    const std::string_view part = rest.substr(0, comma);
    const std::size_t colon = part.find(':');
    std::optional<std::uint32_t> begin = parse_id(part.substr(0, colon));
    std::optional<std::uint32_t> end;
    if (colon == std::string_view::npos) {
      if (begin && *begin != UINT32_MAX) end = *begin + 1;
    } else {
      end = parse_id(part.substr(colon + 1));
    }
    if (!begin || !end)
      return fix_input(std::format("'{}' is not a list of {}s; write numbers and half-open ranges like 0:16 or 3,7,9:12.", text, what));
    if (*begin >= *end)
      return fix_input(std::format("the {} range '{}' is empty; write a:b with a < b (b is not included).", what, part));
    if (*end > limit)
      return fix_input(std::format("{} {} does not exist; this model has {}s 0:{}.", what, *end - 1, what, limit));
    set.add({*begin, *end});
    if (comma == std::string_view::npos) return set;
    rest = rest.substr(comma + 1);
  }
}

std::string format_ranges(const ExpertSet& set) {
  std::string out;
  for (const Range& r : set.ranges()) {
    if (!out.empty()) out += ',';
    out += r.end - r.begin == 1 ? std::format("{}", r.begin) : std::format("{}:{}", r.begin, r.end);
  }
  return out;
}

}  // namespace kvasir
