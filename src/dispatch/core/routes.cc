#include "dispatch/core/routes.h"

#include <algorithm>

namespace kvasir::dispatch {

LayerRoutes::LayerRoutes(std::uint32_t n_expert, std::span<const std::pair<WorkerIndex, ExpertSet>> held)
    : offsets_(n_expert + 1, 0) {
  const auto each = [&](auto&& visit) {
    for (const auto& [worker, set] : held)
      for (const Range& range : set.ranges())
        for (std::uint32_t e = range.begin; e < std::min(range.end, n_expert); ++e) visit(worker, e);
  };
  each([&](WorkerIndex, std::uint32_t e) { ++offsets_[e + 1]; });
  for (std::uint32_t e = 0; e < n_expert; ++e) offsets_[e + 1] += offsets_[e];
  workers_.resize(offsets_[n_expert]);
  std::vector<std::uint32_t> next(offsets_.begin(), offsets_.end() - 1);
  each([&](WorkerIndex worker, std::uint32_t e) { workers_[next[e]++] = worker; });
}

RouteTable::RouteTable(std::span<const std::shared_ptr<const wire::Holdings>> holdings) {
  struct Held {
    std::uint32_t n_expert = 0;
    std::vector<std::pair<WorkerIndex, ExpertSet>> workers;
  };
  std::unordered_map<LayerKey, Held, LayerKeyHash> by_key;
  for (std::size_t w = 0; w < holdings.size(); ++w) {
    if (!holdings[w]) continue;
    for (const wire::Holding& entry : holdings[w]->entries) {
      Held& held = by_key[{entry.layer_id, entry.group}];
      held.n_expert = std::max(held.n_expert, std::min(entry.experts.end(), wire::kExpertsMax));
      // Several slices of one layer in one worker are one replica.
      if (held.workers.empty() || held.workers.back().first != w) held.workers.emplace_back(static_cast<WorkerIndex>(w), ExpertSet{});
      for (const Range& range : entry.experts.ranges()) held.workers.back().second.add(range);
    }
  }
  for (const auto& [key, held] : by_key) layers_.try_emplace(key, held.n_expert, held.workers);
}

}  // namespace kvasir::dispatch
