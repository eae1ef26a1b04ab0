// The oracle: one layer's mixture of experts in double precision, once from the whole file and
// once from shards that are cut, dispatched to and combined as a running system does it. What
// slicing, ids, dispatch and combination may not change is the sum; this measures by how much
// they do.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/expert_set.h"
#include "gguf/moe_model.h"
#include "verify/agreement.h"

namespace kvasir::verify {

// What "the same" means for a regrouped sum of doubles.
inline constexpr double kShardingAbsMax = 3.6e-12;
inline constexpr double kShardingCloseTolerance = 1e-5;

struct ShardingOptions {
  std::uint32_t n_used = 0;    // experts a token uses; 0: as the model says, at most those held
  std::uint32_t n_tokens = 0;  // 0: as many as touch every expert once, at least kShardingTokensMin
  std::uint64_t seed = 1;
  std::optional<ExpertSet> layers{};  // of the model; none: all
  std::function<void(std::uint64_t done, std::uint64_t total)> progress{};
};
inline constexpr std::uint32_t kShardingTokensMin = 4;

struct ShardingLayer {
  std::uint32_t layer = 0;
  gguf::ExpertGroup group{};
  std::uint32_t n_expert = 0;   // of the layer
  std::uint32_t n_touched = 0;
  std::uint32_t n_tokens = 0;
  Agreement per_pair;  // rows travel one per pair and are combined in the router's order
  Agreement partial;   // every shard sums its own rows first
  bool passes() const { return per_pair.max_abs() <= kShardingAbsMax && per_pair.all_close(kShardingCloseTolerance) &&
                               partial.max_abs() <= kShardingAbsMax && partial.all_close(kShardingCloseTolerance); }
};

// Shards in memory, uneven, with gaps, different in every layer; `whole` must outlive them.
// They read their experts through a slice's own layout and header, as from a file.
struct Shards {
  std::vector<gguf::MoeModel> models;
  std::vector<std::shared_ptr<const void>> keep;  // the layouts they read through
};
Result<Shards> cut_shards(const gguf::MoeModel& whole, std::uint32_t n_shards);

// Experts that `whole` holds and no shard does are not drawn.
Result<std::vector<ShardingLayer>> check_sharding(const gguf::MoeModel& whole, std::span<const gguf::MoeModel> shards,
                                                  const ShardingOptions& options);

}  // namespace kvasir::verify
