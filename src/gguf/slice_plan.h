// Which experts of which layers a slice keeps.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/expert_set.h"
#include "gguf/moe_model.h"

namespace kvasir::gguf {

inline constexpr std::size_t kMaxPlanBytes = 16u << 20;

// Sets are of the layer's first group (exps; chexps where that is the only one). A second
// group with a different number of experts (chunk experts: each belongs to a block of n
// experts) follows: it keeps the chunks of the experts kept.
struct SlicePlan {
  std::map<std::uint32_t, ExpertSet> layers;  // no set is empty

  // The same experts in several layers. Texts as parse_ranges reads them; layers without
  // experts are skipped in a range that takes in all layers (":"), and refused otherwise.
  static Result<SlicePlan> from_ranges(const MoeModel& model, std::string_view layers, std::string_view experts);
  // {"layers": {"0": [[0, 16], [20, 21]], "3": [[5, 6]]}}, half-open ranges.
  static Result<SlicePlan> from_json(const MoeModel& model, std::string_view text);
  std::string to_json() const;
};

// The layer's experts of `group` under the plan's `set`, which must fit the layer.
ExpertSet experts_of_group(const MoeModel& model, const LayerExperts& layer, const ExpertSet& set);

}  // namespace kvasir::gguf
