// How one request is cut into calls of the graph. Pure: pairs in, orders out.
//
// A row's bits depend on how many rows its expert computes in the same call (ggml's CPU
// kernels change at a threshold), on nothing else. So the plans are:
//   whole experts   calls of at most `pairs_max` pairs in which every expert keeps all its
//                   rows; an expert with more rows than that gets a call of its own
//   invariant       calls in which no expert has more than `rows_per_expert_max` rows
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ffn/engine.h"

namespace kvasir::ffn {

struct CallPlan {
  std::vector<std::uint32_t> order;  // indices into the pairs; empty: all of them in their own order
  std::vector<std::uint32_t> ends;   // call i covers order[ends[i - 1], ends[i])
};

CallPlan plan_whole_experts(std::span<const LocalPair> pairs, std::uint32_t n_local, std::uint32_t pairs_max);
CallPlan plan_invariant(std::span<const LocalPair> pairs, std::uint32_t n_local, std::uint32_t rows_per_expert_max,
                        std::uint32_t pairs_max);

}  // namespace kvasir::ffn
