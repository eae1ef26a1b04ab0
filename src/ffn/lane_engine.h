// The expert FFN on several CPU threads, each of which computes whole experts.
//
// ggml's threads share every operation and meet after each, some twelve times an FFN. Where
// cores are shared with other work, or asleep, each meeting costs a wake-up. Experts do not
// depend on each other, so here a thread takes the next expert when it is free, and they meet
// once. A row's bits depend on the rows of its expert alone, which stay together.
//
// Where experts are fewer than threads, or do not go up evenly in them, ggml's threads share the
// rest.
#pragma once

#include <memory>
#include <vector>

#include "ffn/crew.h"
#include "ffn/ggml_engine.h"

namespace kvasir::ffn {

class LaneEngine final : public Engine {
 public:
  static Result<std::unique_ptr<Engine>> create(ggml_backend_dev_t device, wire::Numerics numerics, int n_threads);

  Status compute(const wire::Recipe& recipe, const ExpertTensors& tensors, RowsView rows,
                 std::span<const LocalPair> pairs, float* out) override;
  Status compute(wire::Numerics numerics, const wire::Recipe& recipe, const ExpertTensors& tensors, RowsView rows,
                 std::span<const LocalPair> pairs, float* out) override;
  Status compute_fast(const wire::Recipe& recipe, std::span<const ExpertTensors> copies, RowsView rows,
                      std::span<const LocalPair> pairs, float* out) override;
  void set_fast_plans(const FastPlans& plans) override;
  void set_n_threads(int n_threads) override;
  void forget_graphs() override;

 private:
  struct Lane {
    std::unique_ptr<GgmlEngine> engine;
    std::vector<LocalPair> pairs;
    Status status;
  };
  struct Group {  // the uses of one expert: order[begin, end)
    std::uint32_t begin = 0, end = 0;
    std::uint32_t size() const { return end - begin; }
  };

  LaneEngine(ggml_backend_dev_t device, wire::Numerics numerics, int n_threads)
      : device_(device), numerics_(numerics), n_threads_(n_threads) {}

  Status grow(std::uint32_t n_lanes);
  void group_by_expert(std::span<const LocalPair> pairs, std::uint32_t n_local);
  // Calls compute(engine, pairs) for all the pairs, on `n_threads` threads. group_by_expert() has run.
  template <typename Compute>
  Status share(std::span<const LocalPair> pairs, const ExpertTensors& tensors, std::uint32_t n_threads,
               const Compute& compute);
  // The pairs of some groups as one engine takes them.
  PlacedPairs gather(std::span<const LocalPair> pairs, std::span<const Group> groups, std::vector<LocalPair>& into,
                     std::vector<std::uint32_t>& where) const;

  const ggml_backend_dev_t device_;
  const wire::Numerics numerics_;
  int n_threads_;
  FastPlans fast_plans_;
  FastPlans engine_plans_;             // the same without their n_threads, which is this engine's affair
  std::unique_ptr<GgmlEngine> whole_;  // ggml's own threads
  std::vector<Lane> lanes_;            // of one thread each
  std::unique_ptr<Crew> crew_;
  CallPlan call_plan_;
  std::vector<Group> groups_;  // the largest first
  std::vector<LocalPair> rest_pairs_;
  std::vector<std::uint32_t> rest_where_;
};

}  // namespace kvasir::ffn
