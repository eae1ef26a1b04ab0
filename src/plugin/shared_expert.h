// The shared expert of a MoE layer: what is computed here while the workers' answers are on their way.
//
// llama.cpp adds ffn_*_shexp, one more FFN that every token passes through, to the routed
// experts' sum. Its matrices lie in the plugin's buffer as well, so that its nodes come in the same
// split, behind the routed experts; they do not read those, so they can be computed before the
// answers are in. Into memory of their own: in llama.cpp's, their results may lie where a
// value that was read in between still is.
#pragma once

#include <ggml-cpp.h>

#include <memory>
#include <vector>

#include "base/error.h"
#include "plugin/expert_graph.h"

namespace kvasir::plugin {

// Whether `op` is one of its matrix products on our buffers, or an elementwise node between them.
bool claims_shared_expert(const ggml_tensor* op, bool (*is_ours)(ggml_backend_buffer* buffer));

// Nodes behind an FFN's place that can be computed before it, in their order.
struct EarlyNodes {
  std::vector<ggml_tensor*> nodes;
  bool empty() const { return nodes.empty(); }
};
// For each FFN of the plan. None where there is too much to do (a prompt: the answers are not
// looked at meanwhile), or nothing that multiplies a matrix.
std::vector<EarlyNodes> find_early_nodes(const GraphPlan& plan);

// Computes such nodes in memory of its own, and puts their results where the graph wants them.
class ShadowNodes {
 public:
  // Piece by piece, each with one matrix product at the most.
  Status begin(const EarlyNodes& early);
  bool done() const { return next_ == shadows_.size(); }
  Status compute_piece(ggml_backend_t backend);
  bool covers(const ggml_tensor* node) const;
  void put(ggml_tensor* node) const;

 private:
  struct Shadow {
    ggml_tensor* node;
    ggml_tensor tensor;
  };
  std::vector<std::unique_ptr<Shadow>> shadows_;
  std::size_t next_ = 0;
  std::vector<std::byte> memory_;
  ggml_context_ptr context_;
};

}  // namespace kvasir::plugin
