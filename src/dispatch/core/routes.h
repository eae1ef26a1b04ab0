// Which workers hold which expert of which layer. A RouteTable is immutable; a new one
// replaces it whenever a worker's holdings change.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/expert_set.h"
#include "wire/messages.h"

namespace kvasir::dispatch {

using WorkerIndex = std::uint32_t;  // slot in the table of workers; a worker keeps its own

struct LayerKey {
  wire::LayerId id{};
  wire::ExpertGroup group = wire::ExpertGroup::kExps;
  friend bool operator==(const LayerKey&, const LayerKey&) = default;
};

struct LayerKeyHash {
  std::size_t operator()(const LayerKey& key) const {
    std::uint64_t head;  // the id is a cryptographic hash already
    std::memcpy(&head, key.id.data(), sizeof head);
    return static_cast<std::size_t>(head ^ static_cast<std::uint64_t>(key.group));
  }
};

class LayerRoutes {
 public:
  LayerRoutes(std::uint32_t n_expert, std::span<const std::pair<WorkerIndex, ExpertSet>> held);

  std::uint32_t n_expert() const { return static_cast<std::uint32_t>(offsets_.size() - 1); }
  // Ascending. Empty for an expert nobody holds or an id out of range.
  std::span<const WorkerIndex> replicas(std::uint32_t expert) const {
    if (expert >= n_expert()) return {};
    return std::span(workers_).subspan(offsets_[expert], offsets_[expert + 1] - offsets_[expert]);
  }

 private:
  std::vector<std::uint32_t> offsets_;  // n_expert + 1, into workers_
  std::vector<WorkerIndex> workers_;
};

class RouteTable {
 public:
  // `holdings[w]` is what worker w may be asked for; null: nothing.
  explicit RouteTable(std::span<const std::shared_ptr<const wire::Holdings>> holdings);

  const LayerRoutes* find(const LayerKey& key) const {
    const auto it = layers_.find(key);
    return it == layers_.end() ? nullptr : &it->second;
  }

 private:
  std::unordered_map<LayerKey, LayerRoutes, LayerKeyHash> layers_;
};

}  // namespace kvasir::dispatch
