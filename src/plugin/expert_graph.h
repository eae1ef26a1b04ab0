// Recognises the expert FFN inside a ggml graph by structure, not by model.
//
// llama.cpp gives the plugin one split per MoE layer. Inside it this file finds the nodes
// that are the expert FFN (three matrix products and what lies between), turns them into a
// wire::Recipe, and leaves every other node to be computed as it stands. A shape it does
// not know is left whole: it runs locally and is named in the statistics.
//
// Pure: reads tensors and their sources through ggml's public interface, computes nothing.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ffn/engine.h"
#include "wire/recipe.h"

namespace kvasir::plugin {

// One expert FFN found in a graph.
struct ExpertFfn {
  wire::Recipe recipe;
  std::uint32_t layer = 0;
  ffn::ExpertTensors tensors;      // the graph's own weights: local id = expert id
  const ggml_tensor* cur = nullptr;  // rows in: [n_embd, 1 or n_used, n_tokens] f32
  const ggml_tensor* ids = nullptr;  // [n_used, n_tokens] i32, may be a strided view
  ggml_tensor* out = nullptr;        // rows out: [n_embd, n_used, n_tokens] f32, contiguous
  // With the combine chain taken in: the router's weights [1, n_used, n_tokens] f32, and `out`
  // is their sum [n_embd, n_tokens]. Null: the graph itself combines.
  const ggml_tensor* weights = nullptr;
  std::vector<const ggml_tensor*> nodes;  // every node it stands for, `out` among them
};

// The graph's nodes in order, each either local or the place where an FFN is computed.
struct GraphPlan {
  struct Step {
    ggml_tensor* node = nullptr;  // local: compute this node…
    int ffn = -1;                 // …or, if >= 0, compute ffns[ffn] here…
    int capture = -1;             // …or, if >= 0, copy the inputs of ffns[capture] here: local
                                  // nodes run before its place, and the allocator may have
                                  // given them the memory of inputs that it counts as read
  };
  std::vector<ExpertFfn> ffns;
  std::vector<Step> steps;
  // Expert matrix products that fit no known shape, e.g. "blk.3.ffn_down_exps.weight: unary op 12".
  std::vector<std::string> unknown;
};

// `with_combine`: take the sum over a token's experts into the FFN where it follows as
// llama.cpp builds it: MUL by the weights, one VIEW per expert used, ADDs.
GraphPlan plan_graph(ggml_cgraph* graph, bool with_combine);

// --- what the plugin claims -----------------------------------------------------------
// `is_ours(buffer)`: whether a weight lies in the plugin's own buffer type.
struct OpClaims {
  bool (*is_ours)(ggml_backend_buffer* buffer);
  // True for the routed experts' matrix products on our buffers, and for the elementwise
  // nodes around them that would otherwise cut one split into several.
  bool claims(const ggml_tensor* op) const;
  bool is_expert_product(const ggml_tensor* op) const;
  bool derives_from_experts(const ggml_tensor* tensor, int depth) const;
};

}  // namespace kvasir::plugin
