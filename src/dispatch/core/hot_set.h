// Which experts are worth computing on the backbone itself: those used most lately, within a
// budget of bytes. Uses decay, so that yesterday's subject gives way to today's; an expert
// that is in leaves only for one that is used clearly more, because a newcomer's weights have
// to be read first.
//
// Not synchronised: guarded by the lock of the Fleet beside it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "wire/messages.h"

namespace kvasir::dispatch {

class HotSet {
 public:
  // By expert: not 0 if it is to be computed here. Null: none.
  using Members = std::shared_ptr<const std::vector<std::uint8_t>>;

  static constexpr std::uint32_t kPickEveryUses = 1 << 13;
  static constexpr double kDecay = 0.5;       // of all counts at every pick
  static constexpr double kStayAdvantage = 1.25;
  static constexpr double kUsesMin = 2;       // an expert seen once is not hot

  explicit HotSet(std::uint64_t budget_bytes) : budget_bytes_(budget_bytes) {}
  bool enabled() const { return budget_bytes_ > 0; }

  // `layer` counts from 0 in order of registration; each expert of it costs `expert_bytes`
  // (0: not known, never hot).
  void add_layer(std::uint32_t layer, std::uint32_t n_expert, std::uint64_t expert_bytes);
  void note_uses(std::uint32_t layer, std::span<const wire::Pair> pairs);
  Members members(std::uint32_t layer) const { return layer < layers_.size() ? layers_[layer].members : nullptr; }
  std::uint64_t bytes() const { return bytes_; }  // of all members

 private:
  struct Layer {
    std::uint64_t expert_bytes = 0;
    std::vector<float> uses;
    Members members;
  };
  void pick();

  const std::uint64_t budget_bytes_;
  std::uint64_t bytes_ = 0;
  std::uint64_t uses_since_pick_ = 0;
  std::vector<Layer> layers_;
};

}  // namespace kvasir::dispatch
