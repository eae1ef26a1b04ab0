#include "plugin/combine_chain.h"

#include <algorithm>

namespace kvasir::plugin {
namespace {

bool is_output(const ggml_tensor* t) { return (t->flags & GGML_TENSOR_FLAG_OUTPUT) != 0; }

// The only node after `from` that reads `t`; null if there is none, or more than one.
ggml_tensor* only_reader(ggml_cgraph* graph, int from, const ggml_tensor* t) {
  ggml_tensor* reader = nullptr;
  for (int i = from; i < ggml_graph_n_nodes(graph); ++i) {
    ggml_tensor* node = ggml_graph_node(graph, i);
    const bool reads = node->view_src == t || std::ranges::any_of(node->src, [&](const ggml_tensor* src) { return src == t; });
    if (!reads) continue;
    if (reader != nullptr) return nullptr;
    reader = node;
  }
  return reader;
}

bool are_weights(const ggml_tensor* t, std::int64_t n_used, std::int64_t n_tokens) {
  return t != nullptr && t->type == GGML_TYPE_F32 && t->ne[0] == 1 && t->ne[1] == n_used && t->ne[2] == n_tokens && t->ne[3] == 1 &&
         t->nb[1] % sizeof(float) == 0 && t->nb[2] % sizeof(float) == 0;
}

}  // namespace

std::optional<ExpertFfn> take_combine(ggml_cgraph* graph, int after, const ExpertFfn& ffn) {
  const std::int64_t n_embd = ffn.out->ne[0], n_used = ffn.out->ne[1], n_tokens = ffn.out->ne[2];
  if (is_output(ffn.out)) return std::nullopt;
  // A row of its own for each pair: nothing would be summed over.
  if (ffn.cur->ne[1] != 1) return std::nullopt;
  ggml_tensor* weighted = only_reader(graph, after, ffn.out);
  if (weighted == nullptr || weighted->op != GGML_OP_MUL || weighted->src[0] != ffn.out || is_output(weighted) ||
      !are_weights(weighted->src[1], n_used, n_tokens))
    return std::nullopt;

  // One view for each expert used, and nothing else.
  std::vector<ggml_tensor*> views(static_cast<std::size_t>(n_used), nullptr);
  std::int64_t n_views = 0;
  for (int i = after; i < ggml_graph_n_nodes(graph); ++i) {
    ggml_tensor* node = ggml_graph_node(graph, i);
    if (node->view_src != weighted && node->src[0] != weighted && node->src[1] != weighted) continue;
    const bool is_one = node->op == GGML_OP_VIEW && node->src[0] == weighted && node->ne[0] == n_embd && node->ne[1] == n_tokens &&
                        node->ne[2] == 1 && node->ne[3] == 1 && node->nb[1] == weighted->nb[2] &&
                        node->view_offs % weighted->nb[1] == 0 && !is_output(node);
    const std::size_t slot = is_one ? node->view_offs / weighted->nb[1] : views.size();
    if (slot >= views.size() || views[slot] != nullptr) return std::nullopt;
    views[slot] = node;
    ++n_views;
  }
  if (n_views != n_used) return std::nullopt;

  // ((v0 + v1) + v2) + …, in any order of the views; a single one is copied.
  ExpertFfn combined = ffn;
  std::vector<const ggml_tensor*> added{views[0]};
  ggml_tensor* sum = views[0];
  while (true) {
    ggml_tensor* next = only_reader(graph, after, sum);
    if (n_used == 1) {
      if (next == nullptr || next->op != GGML_OP_CONT) return std::nullopt;
      added.push_back(next);
      sum = next;
      break;
    }
    if (static_cast<std::int64_t>(added.size()) == 2 * n_used - 1) break;
    if (next == nullptr || next->op != GGML_OP_ADD) return std::nullopt;
    const ggml_tensor* other = next->src[0] == sum ? next->src[1] : next->src[0];
    if (std::ranges::find(views, other) == views.end() || std::ranges::find(added, other) != added.end()) return std::nullopt;
    if (sum != views[0] && is_output(sum)) return std::nullopt;
    added.push_back(other);
    added.push_back(next);
    sum = next;
  }
  const bool plain = sum->type == GGML_TYPE_F32 && ggml_is_contiguous(sum) && sum->ne[0] == n_embd && sum->ne[1] == n_tokens &&
                     sum->ne[2] == 1 && sum->ne[3] == 1;
  if (!plain) return std::nullopt;
  combined.weights = weighted->src[1];
  combined.out = sum;
  combined.nodes.push_back(weighted);
  combined.nodes.insert(combined.nodes.end(), added.begin(), added.end());
  std::ranges::sort(combined.nodes);
  const auto [first, last] = std::ranges::unique(combined.nodes);
  combined.nodes.erase(first, last);
  return combined;
}

}  // namespace kvasir::plugin
