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

// Keeps its memory from request to request.
class CallPlan {
 public:
  void whole_experts(std::span<const LocalPair> pairs, std::uint32_t n_local, std::uint32_t pairs_max);
  void invariant(std::span<const LocalPair> pairs, std::uint32_t n_local, std::uint32_t rows_per_expert_max,
                 std::uint32_t pairs_max);
  // One call, its pairs sorted by expert.
  void by_expert(std::span<const LocalPair> pairs, std::uint32_t n_local);

  std::vector<std::uint32_t> order;  // indices into the pairs; empty: all of them in their own order
  std::vector<std::uint32_t> ends;   // call i covers order[ends[i - 1], ends[i])

 private:
  void count_rows(std::span<const LocalPair> pairs, std::uint32_t n_local);
  template <typename BucketOf>
  void sort_into_buckets(std::size_t n, std::span<const std::uint32_t> sizes, BucketOf bucket_of);

  std::vector<std::uint32_t> rows_;  // by expert
  std::vector<std::uint32_t> next_, seen_, pass_of_, pass_sizes_;
};

}  // namespace kvasir::ffn
