// The expert FFN by one ggml backend, whose threads share every operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ffn/engine.h"
#include "ffn/graph.h"
#include "ffn/invariance.h"
#include "ffn/per_expert.h"
#include "ffn/plan.h"

namespace kvasir::ffn {

// Pairs, and where their results belong: pair i fills out[where[i] * n_embd …]; an empty
// `where` means out[i * n_embd …].
struct PlacedPairs {
  std::span<const LocalPair> pairs;
  std::span<const std::uint32_t> where;
  std::size_t row_of(std::uint32_t pair) const { return where.empty() ? pair : where[pair]; }
};

// What a call's arena is kept below, unless one expert's rows need more.
inline constexpr std::uint64_t kArenaBytesTarget = 16ull << 20;

class GgmlEngine final : public Engine {
 public:
  GgmlEngine(ggml_backend_dev_t device, ggml_backend_ptr backend, wire::Numerics numerics, int n_threads,
             std::uint64_t arena_bytes_target = kArenaBytesTarget);

  Status compute(const wire::Recipe& recipe, const ExpertTensors& tensors, RowsView rows,
                 std::span<const LocalPair> pairs, float* out) override;
  Status compute(wire::Numerics numerics, const wire::Recipe& recipe, const ExpertTensors& tensors, RowsView rows,
                 std::span<const LocalPair> pairs, float* out) override;
  Status compute_fast(const wire::Recipe& recipe, std::span<const ExpertTensors> copies, RowsView rows,
                      std::span<const LocalPair> pairs, float* out) override;
  void set_fast_plans(const FastPlans& plans) override { fast_plans_ = plans; }
  void set_n_threads(int n_threads) override;
  void forget_graphs() override;

  Status compute(wire::Numerics numerics, const wire::Recipe& recipe, const ExpertTensors& tensors, RowsView rows,
                 PlacedPairs pairs, float* out);
  Status compute_fast(const wire::Recipe& recipe, std::span<const ExpertTensors> copies, RowsView rows,
                      PlacedPairs pairs, float* out);

 private:
  using Cached = std::list<std::pair<GraphKey, FfnGraph>>;

  void drop_cached();
  Status call(const wire::Recipe& recipe, const ExpertTensors& tensors, RowsView rows, PlacedPairs pairs,
              std::span<const std::uint32_t> order, std::uint32_t begin, std::uint32_t end, float* out);
  Status compute_per_expert(const FastPlan& plan, const wire::Recipe& recipe, const ExpertTensors& tensors,
                            RowsView rows, PlacedPairs pairs, float* out);
  Result<PerExpertGraph*> per_expert_graph(const wire::Recipe& recipe, const ExpertTensors& tensors);
  Result<FfnGraph*> cached_graph(const GraphKey& key);
  Result<FfnGraph> make_graph(const GraphKey& key);
  std::unexpected<Error> no_memory(std::uint64_t bytes) const;
  void* staged(std::size_t bytes);
  std::int32_t* staged_ids(std::size_t n);

  ggml_backend_dev_t device_;
  ggml_backend_ptr backend_;
  wire::Numerics numerics_;
  const std::uint64_t arena_bytes_target_;
  ggml_gallocr_ptr arena_;
  std::uint64_t arena_bytes_ = 0;  // by our own estimate, for comparing
  Cached cached_;                  // most recently used first
  std::unordered_map<GraphKey, Cached::iterator, GraphKeyHash> by_key_;
  InvariantRows invariant_rows_;
  CallPlan call_plan_;
  FastPlans fast_plans_;
  int n_threads_;
  std::vector<std::unique_ptr<PerExpertGraph>> per_expert_;  // one a recipe and kind of weights: the layers share it
  std::vector<std::byte> staging_;  // for devices whose memory the host cannot address
  std::vector<std::int32_t> staging_ids_;
};

}  // namespace kvasir::ffn
