#include "plugin/shared_expert.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <format>
#include <string_view>
#include <utility>

namespace kvasir::plugin {
namespace {

constexpr int kDeriveDepthMax = 16;
// About a millisecond on one thread: as long as nobody looks at the sockets.
constexpr std::int64_t kEarlyMacsMax = 64 << 20;
constexpr std::size_t kAlignment = 64;
constexpr std::size_t kGraphNodesMax = 64;

// "blk.3.ffn_up_shexp.weight"; ffn_gate_inp_shexp is its gate's.
bool is_shared_weight(const ggml_tensor* t) {
  const std::string_view name = ggml_get_name(t);
  return t->op == GGML_OP_NONE && name.starts_with("blk.") && name.contains(".ffn_") && name.ends_with("_shexp.weight");
}

bool derives(const ggml_tensor* t, bool (*is_ours)(ggml_backend_buffer*), int depth) {
  if (t == nullptr || depth <= 0) return false;
  switch (t->op) {
    case GGML_OP_MUL_MAT: return is_shared_weight(t->src[0]) && is_ours(t->src[0]->buffer);
    case GGML_OP_UNARY:
    case GGML_OP_SQR:
    case GGML_OP_SCALE:
    case GGML_OP_CLAMP: return derives(t->src[0], is_ours, depth - 1);
    case GGML_OP_MUL: return derives(t->src[0], is_ours, depth - 1) && derives(t->src[1], is_ours, depth - 1);
    case GGML_OP_GLU:
      return derives(t->src[0], is_ours, depth - 1) && (t->src[1] == nullptr || derives(t->src[1], is_ours, depth - 1));
    default: return false;
  }
}

bool is_view(const ggml_tensor* t) {
  return t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
}

bool contains(const std::vector<const ggml_tensor*>& all, const ggml_tensor* t) { return std::ranges::find(all, t) != all.end(); }

// Of the local steps behind step `at` up to the next FFN.
EarlyNodes behind(const GraphPlan& plan, std::size_t at) {
  const ExpertFfn& ffn = plan.ffns[static_cast<std::size_t>(plan.steps[at].ffn)];
  std::vector<const ggml_tensor*> late = {ffn.out}, taken;  // depend on the FFN; do not
  EarlyNodes found;
  std::int64_t macs = 0;
  for (std::size_t s = at + 1; s < plan.steps.size() && plan.steps[s].node != nullptr; ++s) {
    ggml_tensor* node = plan.steps[s].node;
    bool is_late = contains(late, node->view_src);
    for (const ggml_tensor* src : node->src) is_late |= src != nullptr && contains(late, src);
    // What writes into another value's memory stays in its place.
    is_late |= !is_view(node) && node->view_src != nullptr && !contains(taken, node->view_src);
    // A view of a value that is made elsewhere is that value, whenever it is looked at.
    if (is_late) {
      late.push_back(node);
      continue;
    }
    taken.push_back(node);
    found.nodes.push_back(node);
    if (node->op == GGML_OP_MUL_MAT) macs += ggml_nelements(node) * node->src[0]->ne[0];
  }
  if (macs == 0 || macs > kEarlyMacsMax || found.nodes.size() > kGraphNodesMax) found.nodes.clear();
  return found;
}

}  // namespace

bool claims_shared_expert(const ggml_tensor* op, bool (*is_ours)(ggml_backend_buffer* buffer)) {
  return derives(op, is_ours, kDeriveDepthMax);
}

std::vector<EarlyNodes> find_early_nodes(const GraphPlan& plan) {
  std::vector<EarlyNodes> found(plan.ffns.size());
  for (std::size_t s = 0; s < plan.steps.size(); ++s)
    if (plan.steps[s].ffn >= 0) found[static_cast<std::size_t>(plan.steps[s].ffn)] = behind(plan, s);
  return found;
}

Status ShadowNodes::begin(const EarlyNodes& early) {
  shadows_.clear();
  next_ = 0;
  if (early.empty()) return {};
  if (!context_) {
    const std::size_t bytes = ggml_graph_overhead_custom(kGraphNodesMax, false) + 1024;
    context_.reset(ggml_init({.mem_size = bytes, .mem_buffer = nullptr, .no_alloc = true}));
    if (!context_) return fatal("out of memory for a graph of local nodes.");
  }
  const auto shadow_of = [&](const ggml_tensor* t) -> ggml_tensor* {
    const auto found = std::ranges::find(shadows_, t, [](const auto& shadow) { return shadow->node; });
    return found == shadows_.end() ? nullptr : &(*found)->tensor;
  };
  std::size_t bytes = kAlignment;
  for (const ggml_tensor* node : early.nodes)
    if (node->view_src == nullptr) bytes += (ggml_nbytes(node) + kAlignment - 1) / kAlignment * kAlignment;
  if (memory_.size() < bytes) memory_.resize(bytes);
  auto* free = reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(memory_.data()) + kAlignment - 1) / kAlignment * kAlignment);
  for (ggml_tensor* node : early.nodes) {
    Shadow& made = *shadows_.emplace_back(std::make_unique<Shadow>(Shadow{node, *node}));
    for (ggml_tensor*& src : made.tensor.src)
      if (ggml_tensor* shadow = src == nullptr ? nullptr : shadow_of(src)) src = shadow;
    if (node->view_src == nullptr) {
      made.tensor.data = free;
      free += (ggml_nbytes(node) + kAlignment - 1) / kAlignment * kAlignment;
    } else if (ggml_tensor* viewed = shadow_of(node->view_src)) {
      made.tensor.view_src = viewed;
      made.tensor.data = static_cast<std::byte*>(viewed->data) + node->view_offs;
    }
  }
  return {};
}

Status ShadowNodes::compute_piece(ggml_backend_t backend) {
  ggml_reset(context_.get());
  ggml_cgraph* graph = ggml_new_graph_custom(context_.get(), kGraphNodesMax, false);
  bool multiplied = false;
  for (; next_ < shadows_.size(); ++next_) {
    ggml_tensor* t = &shadows_[next_]->tensor;
    if (t->op == GGML_OP_MUL_MAT && std::exchange(multiplied, true)) break;
    ggml_graph_add_node(graph, t);
  }
  const ggml_status status = ggml_backend_graph_compute(backend, graph);
  if (status != GGML_STATUS_SUCCESS) return fatal(std::format("ggml's CPU backend failed: {}.", ggml_status_to_string(status)));
  return {};
}

bool ShadowNodes::covers(const ggml_tensor* node) const {
  return std::ranges::any_of(shadows_, [&](const auto& shadow) { return shadow->node == node; });
}

void ShadowNodes::put(ggml_tensor* node) const {
  for (const auto& shadow : shadows_)
    if (shadow->node == node && !is_view(node) && shadow->tensor.data != node->data)
      std::memcpy(node->data, shadow->tensor.data, ggml_nbytes(node));
}

}  // namespace kvasir::plugin
