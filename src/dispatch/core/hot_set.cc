#include "dispatch/core/hot_set.h"

#include <algorithm>

namespace kvasir::dispatch {

void HotSet::add_layer(std::uint32_t layer, std::uint32_t n_expert, std::uint64_t expert_bytes) {
  if (!enabled()) return;
  if (layers_.size() <= layer) layers_.resize(layer + 1);
  layers_[layer] = {.expert_bytes = expert_bytes, .uses = std::vector<float>(n_expert, 0.0f), .members = nullptr};
}

void HotSet::note_uses(std::uint32_t layer, std::span<const wire::Pair> pairs) {
  if (layer >= layers_.size()) return;
  std::vector<float>& uses = layers_[layer].uses;
  for (const wire::Pair& pair : pairs)
    if (pair.expert < uses.size()) ++uses[pair.expert];
  uses_since_pick_ += pairs.size();
  if (uses_since_pick_ >= kPickEveryUses) pick();
}

void HotSet::pick() {
  struct Candidate {
    double worth;  // uses for each byte
    std::uint32_t layer, expert;
  };
  std::vector<Candidate> candidates;
  for (std::uint32_t l = 0; l < layers_.size(); ++l) {
    const Layer& layer = layers_[l];
    if (layer.expert_bytes == 0) continue;
    for (std::uint32_t e = 0; e < layer.uses.size(); ++e) {
      if (layer.uses[e] < kUsesMin) continue;
      const double stays = layer.members && (*layer.members)[e] != 0 ? kStayAdvantage : 1.0;
      candidates.push_back({layer.uses[e] * stays / static_cast<double>(layer.expert_bytes), l, e});
    }
  }
  std::ranges::sort(candidates, [](const Candidate& a, const Candidate& b) { return a.worth > b.worth; });
  std::vector<std::vector<std::uint8_t>> chosen(layers_.size());
  bytes_ = 0;
  for (const Candidate& c : candidates) {
    const std::uint64_t cost = layers_[c.layer].expert_bytes;
    if (cost > budget_bytes_ - bytes_) continue;
    bytes_ += cost;
    chosen[c.layer].resize(layers_[c.layer].uses.size(), 0);
    chosen[c.layer][c.expert] = 1;
  }
  for (std::uint32_t l = 0; l < layers_.size(); ++l) {
    layers_[l].members = chosen[l].empty() ? nullptr : std::make_shared<const std::vector<std::uint8_t>>(std::move(chosen[l]));
    for (float& uses : layers_[l].uses) uses *= static_cast<float>(kDecay);
  }
  uses_since_pick_ = 0;
}

}  // namespace kvasir::dispatch
