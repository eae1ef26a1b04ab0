// One ggml backend instance: computes the splits llama.cpp hands us, on its caller's thread.
// The expert FFNs go through the dispatcher; every other node runs on a private CPU backend.
#pragma once

#include <memory>
#include <vector>

#include <ggml-cpp.h>

#include "dispatch/dispatcher.h"
#include "ffn/engine.h"
#include "plugin/expert_graph.h"
#include "plugin/runtime.h"
#include "plugin/shared_expert.h"

namespace kvasir::plugin {

class Backend {
 public:
  static Result<std::unique_ptr<Backend>> create(Runtime& runtime);

  void set_n_threads(int n_threads);
  // Returns when every output of the graph is written.
  Status compute(ggml_cgraph* graph);

 private:
  explicit Backend(Runtime& runtime) : runtime_(runtime) {}

  // The rows and pairs of one FFN, read from the graph's tensors; copied where the graph may
  // reuse their memory before the results are in.
  struct Job {
    std::vector<wire::Pair> pairs;
    std::vector<float> weights;           // of the pairs, where the FFN includes their sum
    std::vector<std::uint32_t> nan_rows;  // one of their weights is not finite, so neither is the sum
    std::vector<float> rows_copy;
    const float* rows = nullptr;
    std::size_t row_stride = 0;
    std::uint32_t n_rows = 0;
    bool captured = false;
  };

  void capture_weights(const ggml_tensor* weights, Job& job);
  Status capture(const ExpertFfn& ffn, bool copy_rows, Job& job);
  Status compute_ffn(const ExpertFfn& ffn, Job& job, const EarlyNodes& early);
  Status compute_local_pairs(const ExpertFfn& ffn, const dispatch::Round& round, std::span<const std::uint32_t> indices);
  Status compute_nodes(std::vector<ggml_tensor*>& nodes);  // and clears them
  Status compute_whole(ggml_cgraph* graph);
  Result<ffn::Engine*> engine();

  Runtime& runtime_;
  int n_threads_ = 1;
  ggml_backend_ptr cpu_;         // n_threads_
  ggml_backend_ptr cpu_single_;  // one thread: a handful of small nodes costs less than waking others
  ggml_context_ptr graph_context_;
  std::unique_ptr<ffn::Engine> engine_;
  std::unique_ptr<dispatch::RoundDriver> driver_;
  std::vector<Job> jobs_;
  ShadowNodes shadows_;
  std::vector<float> local_rows_;
  std::vector<ffn::LocalPair> local_pairs_;
};

}  // namespace kvasir::plugin
