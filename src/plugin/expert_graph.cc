#include "plugin/expert_graph.h"

#include <ggml-backend.h>

#include <algorithm>
#include <bit>
#include <format>
#include <optional>
#include <string_view>

#include "gguf/expert_tensor.h"
#include "plugin/combine_chain.h"

namespace kvasir::plugin {
namespace {

using gguf::ExpertTensorName;
using gguf::ExpertPart;
using gguf::ExpertRole;
using wire::Activation;
using wire::GateLayout;

// An ADD chain over the experts of one token is as long as n_used; llama.cpp allows 512.
constexpr int kDeriveDepthMax = 1024;

std::optional<ExpertTensorName> expert_name(const ggml_tensor* tensor) {
  return tensor == nullptr ? std::nullopt : gguf::parse_expert_tensor(ggml_get_name(tensor));
}

float float_param(const ggml_tensor* tensor, int index) { return std::bit_cast<float>(tensor->op_params[index]); }

bool is_reshaping(ggml_op op) {
  return op == GGML_OP_RESHAPE || op == GGML_OP_VIEW || op == GGML_OP_REPEAT || op == GGML_OP_CONT ||
         op == GGML_OP_PERMUTE || op == GGML_OP_TRANSPOSE;
}

// "MUL(CLAMP(UNARY:SILU(W)), W)", W a matrix product: enough of an unknown shape for a report.
constexpr int kDescribeDepthMax = 8;
std::string describe(const ggml_tensor* t, int depth) {
  if (t->op == GGML_OP_MUL_MAT_ID) return "W";
  if (t->op == GGML_OP_NONE || depth <= 0) return "…";
  std::string text = ggml_op_name(t->op);
  if (t->op == GGML_OP_UNARY) text += std::format(":{}", ggml_unary_op_name(ggml_get_unary_op(t)));
  if (t->op == GGML_OP_GLU) text += std::format(":{}", ggml_glu_op_name(ggml_get_glu_op(t)));
  std::string sources;
  for (const ggml_tensor* src : t->src)
    if (src != nullptr) sources += std::format("{}{}", sources.empty() ? "" : ", ", describe(src, depth - 1));
  return std::format("{}({})", text, sources);
}

// Whether `tensor` spreads a per-expert `.scale` tensor over the pairs:
// GET_ROWS(REPEAT(RESHAPE(scale)), ids). Null if not.
const ggml_tensor* scale_root(const ggml_tensor* tensor) {
  if (tensor == nullptr) return nullptr;
  const ggml_tensor* t = tensor;
  if (t->op == GGML_OP_GET_ROWS) t = t->src[0];
  while (t != nullptr && is_reshaping(t->op)) t = t->src[0];
  if (t == nullptr || t->op != GGML_OP_NONE) return nullptr;
  const auto name = expert_name(t);
  return name && name->part == ExpertPart::kScale ? t : nullptr;
}

// One matrix product of the FFN with what may follow it: scale, bias, view of a half, clamp.
struct Product {
  ggml_tensor* weight = nullptr;
  ggml_tensor* bias = nullptr;
  ggml_tensor* scale = nullptr;
  const ggml_tensor* cur = nullptr;
  const ggml_tensor* ids = nullptr;
  const ggml_tensor* view = nullptr;
  wire::Clamp clamp;
};

class Matcher {
 public:
  Matcher(ggml_cgraph* graph, int down_index) : graph_(graph), down_index_(down_index) {}

  // The FFN that ends in the product at `down_index`, or the reason why it is not one.
  Result<ExpertFfn> match();

 private:
  std::unexpected<Error> no(std::string why) const { return fix_input(std::move(why)); }
  void take(const ggml_tensor* node) { ffn_.nodes.push_back(node); }
  bool take_scale(const ggml_tensor* mul, const ggml_tensor* ids, ggml_tensor** scale);
  Result<Product> follow(ggml_tensor* t);
  Status match_hidden(ggml_tensor* hidden);
  Status match_soft_cap(ggml_tensor* hidden);
  ggml_tensor* take_soft_cap(ggml_tensor* node, wire::SoftCap& cap);
  Status match_gated(ggml_tensor* gate, ggml_tensor* up, Activation activation);
  void match_after_down();
  Status check_weights(const Product& p, ExpertRole role) const;

  ggml_cgraph* graph_;
  int down_index_;
  ExpertTensorName down_name_{};
  const ggml_tensor* ids_ = nullptr;
  ExpertFfn ffn_;
};

// `mul` = x * GET_ROWS(…scale…, ids): notes its nodes and the scale.
bool Matcher::take_scale(const ggml_tensor* mul, const ggml_tensor* ids, ggml_tensor** scale) {
  const ggml_tensor* rows = mul->src[1];
  if (rows == nullptr || rows->op != GGML_OP_GET_ROWS || (ids != nullptr && rows->src[1] != ids)) return false;
  const ggml_tensor* root = scale_root(rows);
  if (root == nullptr || root->type != GGML_TYPE_F32 || !ggml_is_contiguous(root)) return false;
  take(mul);
  for (const ggml_tensor* t = rows; t != root; t = t->src[0]) take(t);
  *scale = const_cast<ggml_tensor*>(root);
  return true;
}

Result<Product> Matcher::follow(ggml_tensor* t) {
  Product p;
  if (t->op == GGML_OP_CLAMP) {
    p.clamp = {true, float_param(t, 0), float_param(t, 1)};
    take(t);
    t = t->src[0];
  }
  if (t->op == GGML_OP_VIEW) {
    p.view = t;
    take(t);
    t = t->src[0];
  }
  if (t->op == GGML_OP_ADD_ID) {
    p.bias = t->src[1];
    p.ids = t->src[2];
    take(t);
    t = t->src[0];
  }
  if (t->op == GGML_OP_MUL) {
    if (!take_scale(t, p.ids, &p.scale)) return no("a product is multiplied by something that is no per-expert scale");
    t = t->src[0];
  }
  if (t->op != GGML_OP_MUL_MAT_ID) return no(std::format("operation {} where a matrix product was expected", ggml_op_name(t->op)));
  if (p.ids != nullptr && p.ids != t->src[2]) return no("a bias uses other expert ids than its product");
  take(t);
  p.weight = t->src[0];
  p.cur = t->src[1];
  p.ids = t->src[2];
  return p;
}

Status Matcher::check_weights(const Product& p, ExpertRole role) const {
  const auto name = expert_name(p.weight);
  if (!name || name->part != ExpertPart::kWeight || name->role != role || name->layer != down_name_.layer ||
      name->group != down_name_.group)
    return no(std::format("{} stands in an unexpected place", ggml_get_name(p.weight)));
  if (p.ids != ids_) return no("the products use different expert ids");
  if (p.bias != nullptr && (p.bias->type != GGML_TYPE_F32 || !ggml_is_contiguous(p.bias))) return no("a bias is not plain f32");
  return {};
}

Status Matcher::match_gated(ggml_tensor* gate, ggml_tensor* up, Activation activation) {
  ffn_.recipe.activation = activation;
  KVASIR_ASSIGN(const Product u, follow(up));
  KVASIR_ASSIGN(const Product g, follow(gate));
  ffn_.recipe.clamp_up = u.clamp;
  ffn_.recipe.clamp_gate = g.clamp;
  if (g.cur != u.cur) return no("gate and up read different rows");
  ffn_.cur = u.cur;
  if (g.weight == u.weight) {
    // One product, cut in halves by views: gate first.
    if (g.view == nullptr || u.view == nullptr) return no("a merged product without views");
    const std::int64_t n_ff = g.view->ne[0];
    const std::size_t half_bytes = static_cast<std::size_t>(n_ff) * sizeof(float);
    if (u.view->ne[0] != n_ff || g.weight->ne[1] != 2 * n_ff || g.view->view_offs != 0 || u.view->view_offs != half_bytes)
      return no("the halves of a merged product lie in an unexpected order");
    ffn_.recipe.gate_layout = GateLayout::kMerged;
    KVASIR_TRY(check_weights(g, ExpertRole::kGateUp));
    ffn_.tensors.gate_up = g.weight;
    ffn_.tensors.gate_up_bias = g.bias;
    ffn_.tensors.gate_up_scale = g.scale;
  } else {
    if (g.view != nullptr || u.view != nullptr) return no("a view of a split product");
    ffn_.recipe.gate_layout = GateLayout::kSplit;
    KVASIR_TRY(check_weights(g, ExpertRole::kGate));
    KVASIR_TRY(check_weights(u, ExpertRole::kUp));
    ffn_.tensors.gate = g.weight;
    ffn_.tensors.gate_bias = g.bias;
    ffn_.tensors.gate_scale = g.scale;
    ffn_.tensors.up = u.weight;
    ffn_.tensors.up_bias = u.bias;
    ffn_.tensors.up_scale = u.scale;
  }
  ffn_.recipe.gate_bias = ffn_.tensors.gate_bias != nullptr;
  ffn_.recipe.gate_scale = ffn_.tensors.gate_scale != nullptr;
  ffn_.recipe.up_bias = u.bias != nullptr;
  ffn_.recipe.up_scale = u.scale != nullptr;
  return {};
}

std::optional<Activation> gated_activation(ggml_glu_op op) {
  switch (op) {
    case GGML_GLU_OP_SWIGLU: return Activation::kSwiglu;
    case GGML_GLU_OP_GEGLU: return Activation::kGeglu;
    case GGML_GLU_OP_REGLU: return Activation::kReglu;
    case GGML_GLU_OP_GEGLU_ERF: return Activation::kGegluErf;
    case GGML_GLU_OP_GEGLU_QUICK: return Activation::kGegluQuick;
    case GGML_GLU_OP_SWIGLU_OAI: return Activation::kSwigluOai;
    case GGML_GLU_OP_SWIGLU_CLAMP: return Activation::kSwigluClamp;
    default: return std::nullopt;
  }
}

std::optional<Activation> plain_activation(ggml_unary_op op) {
  switch (op) {
    case GGML_UNARY_OP_SILU: return Activation::kSilu;
    case GGML_UNARY_OP_GELU: return Activation::kGelu;
    case GGML_UNARY_OP_RELU: return Activation::kRelu;
    case GGML_UNARY_OP_GELU_ERF: return Activation::kGeluErf;
    case GGML_UNARY_OP_GELU_QUICK: return Activation::kGeluQuick;
    default: return std::nullopt;
  }
}

// SCALE(TANH(SCALE(x))): notes its nodes and constants, returns x; null for anything else.
ggml_tensor* Matcher::take_soft_cap(ggml_tensor* node, wire::SoftCap& cap) {
  const auto is_scale = [](const ggml_tensor* t) { return t->op == GGML_OP_SCALE && float_param(t, 1) == 0; };
  if (!is_scale(node)) return nullptr;
  ggml_tensor* bent = node->src[0];
  if (bent->op != GGML_OP_UNARY || ggml_get_unary_op(bent) != GGML_UNARY_OP_TANH || !is_scale(bent->src[0])) return nullptr;
  for (const ggml_tensor* t : {node, bent, bent->src[0]}) take(t);
  cap = {.in = float_param(bent->src[0], 0), .out = float_param(node, 0)};
  return bent->src[0]->src[0];
}

// (cap(gate) * sigmoid(gate)) * cap(up)
Status Matcher::match_soft_cap(ggml_tensor* hidden) {
  ggml_tensor* activated = hidden->src[0];
  ggml_tensor* sigmoid = activated->src[1];
  ggml_tensor* gate = take_soft_cap(activated->src[0], ffn_.recipe.cap_gate);
  ggml_tensor* up = take_soft_cap(hidden->src[1], ffn_.recipe.cap_up);
  if (gate == nullptr || up == nullptr || sigmoid->op != GGML_OP_UNARY || ggml_get_unary_op(sigmoid) != GGML_UNARY_OP_SIGMOID ||
      sigmoid->src[0] != gate)
    return no("a product of three paths that is no soft-capped silu");
  take(activated);
  take(sigmoid);
  return match_gated(gate, up, Activation::kSoftCapSiluMul);
}

Status Matcher::match_hidden(ggml_tensor* hidden) {
  take(hidden);
  if (hidden->op == GGML_OP_GLU) {
    const auto activation = gated_activation(ggml_get_glu_op(hidden));
    const bool swapped = hidden->op_params[1] != 0;
    if (!activation || swapped || hidden->src[1] == nullptr)
      return no(std::format("gated activation {} in a form not known", ggml_glu_op_name(ggml_get_glu_op(hidden))));
    if (*activation == Activation::kSwigluOai) {
      ffn_.recipe.alpha = float_param(hidden, 2);
      ffn_.recipe.limit = float_param(hidden, 3);
    }
    // Params 2 and 3 are those of SWIGLU_OAI; SWIGLU_CLAMP has its limit in the same place.
    if (*activation == Activation::kSwigluClamp) ffn_.recipe.limit = float_param(hidden, 3);
    return match_gated(hidden->src[0], hidden->src[1], *activation);
  }
  if (hidden->op == GGML_OP_MUL && hidden->src[0]->op == GGML_OP_MUL) return match_soft_cap(hidden);
  if (hidden->op == GGML_OP_MUL) {
    ggml_tensor* activated = hidden->src[0];
    if (activated->op == GGML_OP_CLAMP) {
      ffn_.recipe.clamp_gate_activated = {true, float_param(activated, 0), float_param(activated, 1)};
      take(activated);
      activated = activated->src[0];
    }
    if (activated->op != GGML_OP_UNARY || ggml_get_unary_op(activated) != GGML_UNARY_OP_SILU)
      return no("a product of two paths that is no clamped silu gate");
    take(activated);
    return match_gated(activated->src[0], hidden->src[1], Activation::kSiluMul);
  }
  std::optional<Activation> activation;
  ggml_tensor* unary = hidden;
  if (hidden->op == GGML_OP_SQR) {
    unary = hidden->src[0];
    if (unary->op == GGML_OP_UNARY && ggml_get_unary_op(unary) == GGML_UNARY_OP_RELU) activation = Activation::kReluSqr;
    take(unary);
  } else if (hidden->op == GGML_OP_UNARY) {
    activation = plain_activation(ggml_get_unary_op(hidden));
  }
  if (!activation)
    return no(std::format("activation {} is not known",
                          hidden->op == GGML_OP_UNARY ? ggml_unary_op_name(ggml_get_unary_op(hidden)) : ggml_op_name(hidden->op)));
  KVASIR_ASSIGN(const Product u, follow(unary->src[0]));
  if (u.view != nullptr) return no("a view of an ungated product");
  ffn_.recipe.gate_layout = GateLayout::kNone;
  ffn_.recipe.activation = *activation;
  ffn_.recipe.clamp_up = u.clamp;
  KVASIR_TRY(check_weights(u, ExpertRole::kUp));
  ffn_.cur = u.cur;
  ffn_.tensors.up = u.weight;
  ffn_.tensors.up_bias = u.bias;
  ffn_.tensors.up_scale = u.scale;
  ffn_.recipe.up_bias = u.bias != nullptr;
  ffn_.recipe.up_scale = u.scale != nullptr;
  return {};
}

// Scale and bias of the down product belong to the expert if they directly follow it.
void Matcher::match_after_down() {
  const int n = ggml_graph_n_nodes(graph_);
  for (int i = down_index_ + 1; i < n; ++i) {
    ggml_tensor* node = ggml_graph_node(graph_, i);
    if (node->src[0] != ffn_.out) continue;
    if (node->op == GGML_OP_MUL && ffn_.tensors.down_scale == nullptr && ffn_.tensors.down_bias == nullptr) {
      if (take_scale(node, ids_, &ffn_.tensors.down_scale)) ffn_.out = node;
    } else if (node->op == GGML_OP_ADD_ID && ffn_.tensors.down_bias == nullptr && node->src[2] == ids_ &&
               node->src[1]->type == GGML_TYPE_F32 && ggml_is_contiguous(node->src[1])) {
      ffn_.tensors.down_bias = node->src[1];
      take(node);
      ffn_.out = node;
    }
  }
  ffn_.recipe.down_scale = ffn_.tensors.down_scale != nullptr;
  ffn_.recipe.down_bias = ffn_.tensors.down_bias != nullptr;
}

Result<ExpertFfn> Matcher::match() {
  ggml_tensor* down = ggml_graph_node(graph_, down_index_);
  down_name_ = *expert_name(down->src[0]);
  ids_ = down->src[2];
  ffn_.layer = down_name_.layer;
  ffn_.recipe.group = static_cast<wire::ExpertGroup>(down_name_.group);
  ffn_.tensors.down = down->src[0];
  ffn_.out = down;
  take(down);
  KVASIR_TRY(match_hidden(down->src[1]));
  match_after_down();

  const ggml_tensor* w = ffn_.tensors.down;
  ffn_.recipe.n_ff = static_cast<std::uint32_t>(w->ne[0]);
  ffn_.recipe.n_embd = static_cast<std::uint32_t>(w->ne[1]);
  ffn_.recipe.n_expert = static_cast<std::uint32_t>(w->ne[2]);
  ffn_.tensors.n_local = ffn_.recipe.n_expert;
  KVASIR_TRY(ffn::Engine::check(ffn_.recipe, ffn_.tensors));

  const ggml_tensor* cur = ffn_.cur;
  const ggml_tensor* out = ffn_.out;
  const std::int64_t n_used = ids_->ne[0];
  const std::int64_t n_tokens = ids_->ne[1];
  const bool rows_fit = cur->type == GGML_TYPE_F32 && cur->nb[0] == sizeof(float) && cur->ne[0] == ffn_.recipe.n_embd &&
                        (cur->ne[1] == 1 || cur->ne[1] == n_used) && cur->ne[2] == n_tokens && cur->ne[3] == 1;
  const bool ids_fit = ids_->type == GGML_TYPE_I32 && ids_->nb[0] == sizeof(std::int32_t) && ids_->ne[2] == 1 && ids_->ne[3] == 1;
  const bool out_fits = out->type == GGML_TYPE_F32 && ggml_is_contiguous(out) && out->ne[0] == ffn_.recipe.n_embd &&
                        out->ne[1] == n_used && out->ne[2] == n_tokens && out->ne[3] == 1;
  if (!rows_fit || !ids_fit || !out_fits) return no("rows, ids or result have an unexpected shape");
  ffn_.ids = ids_;

  std::ranges::sort(ffn_.nodes);
  const auto [first, last] = std::ranges::unique(ffn_.nodes);
  ffn_.nodes.erase(first, last);
  for (const ggml_tensor* node : ffn_.nodes)
    if (node != ffn_.out && (node->flags & GGML_TENSOR_FLAG_OUTPUT) != 0) return no("an inner value is asked for as output");
  return std::move(ffn_);
}

bool contains(const std::vector<const ggml_tensor*>& sorted, const ggml_tensor* t) {
  return std::ranges::binary_search(sorted, t);
}

// Whether some node outside the FFN reads a value that only exists inside it, or part of
// the FFN lies outside the graph (the caller asked for a piece of it).
bool is_separable(ggml_cgraph* graph, const ExpertFfn& ffn) {
  const int n = ggml_graph_n_nodes(graph);
  std::size_t inside = 0;
  for (int i = 0; i < n; ++i) {
    const ggml_tensor* node = ggml_graph_node(graph, i);
    if (contains(ffn.nodes, node)) {
      ++inside;
      continue;
    }
    const auto reads_inner = [&](const ggml_tensor* src) { return src != nullptr && src != ffn.out && contains(ffn.nodes, src); };
    for (const ggml_tensor* src : node->src)
      if (reads_inner(src)) return false;
    if (reads_inner(node->view_src)) return false;
  }
  return inside == ffn.nodes.size();
}

bool writes_memory(const ggml_tensor* node) {
  switch (node->op) {
    case GGML_OP_NONE:
    case GGML_OP_VIEW:
    case GGML_OP_RESHAPE:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE: return false;
    default: return true;
  }
}

// An FFN is computed at the place of its last node. Its inputs are taken at its first, if
// anything else is written in between.
void plan_steps(ggml_cgraph* graph, GraphPlan& plan) {
  const int n = ggml_graph_n_nodes(graph);
  std::vector<int> ffn_of(static_cast<std::size_t>(n), -1);
  std::vector<int> first(plan.ffns.size(), -1);
  std::vector<bool> interrupted(plan.ffns.size(), false);
  std::vector<bool> open(plan.ffns.size(), false);
  for (int i = 0; i < n; ++i) {
    const ggml_tensor* node = ggml_graph_node(graph, i);
    for (std::size_t f = 0; f < plan.ffns.size(); ++f) {
      if (contains(plan.ffns[f].nodes, node)) {
        ffn_of[i] = static_cast<int>(f);
        if (first[f] < 0) first[f] = i;
        open[f] = node != plan.ffns[f].out;
      } else if (open[f] && writes_memory(node)) {
        interrupted[f] = true;
      }
    }
  }
  for (int i = 0; i < n; ++i) {
    ggml_tensor* node = ggml_graph_node(graph, i);
    const int f = ffn_of[i];
    if (f < 0) {
      plan.steps.push_back({.node = node});
    } else {
      if (i == first[f] && interrupted[f]) plan.steps.push_back({.capture = f});
      if (node == plan.ffns[f].out) plan.steps.push_back({.ffn = f});
    }
  }
}

}  // namespace

GraphPlan plan_graph(ggml_cgraph* graph, bool with_combine) {
  GraphPlan plan;
  const int n = ggml_graph_n_nodes(graph);
  for (int i = 0; i < n; ++i) {
    ggml_tensor* node = ggml_graph_node(graph, i);
    if (node->op != GGML_OP_MUL_MAT_ID) continue;
    const auto name = expert_name(node->src[0]);
    if (!name || name->role != ExpertRole::kDown || name->part != ExpertPart::kWeight) continue;
    Result<ExpertFfn> ffn = Matcher(graph, i).match();
    if (ffn && !is_separable(graph, *ffn)) ffn = fix_input("part of it is read from outside");
    if (ffn) {
      if (with_combine) {
        std::optional<ExpertFfn> combined = take_combine(graph, i, *ffn);
        if (combined && is_separable(graph, *combined)) ffn = *std::move(combined);
      }
      plan.ffns.push_back(*std::move(ffn));
    } else {
      plan.unknown.push_back(std::format("{}: {}, {}", ggml_get_name(node->src[0]), ffn.error().message,
                                         describe(node->src[1], kDescribeDepthMax)));
    }
  }

  plan_steps(graph, plan);
  return plan;
}

bool OpClaims::is_expert_product(const ggml_tensor* op) const {
  if (op->op != GGML_OP_MUL_MAT_ID || op->src[0] == nullptr) return false;
  ggml_backend_buffer* buffer = op->src[0]->buffer;
  if (const auto name = expert_name(op->src[0])) return name->part == ExpertPart::kWeight && is_ours(buffer);
  // Other stacked matrices of a model (attn_v_exps, …) stay where llama.cpp would put them.
  // Nameless operands (ggml's own operator tests, which ask before they allocate) are computed.
  if (std::string_view(ggml_get_name(op->src[0])).starts_with("blk.")) return false;
  return buffer == nullptr || is_ours(buffer);
}

bool OpClaims::derives_from_experts(const ggml_tensor* tensor, int depth) const {
  if (tensor == nullptr || depth <= 0) return false;
  switch (tensor->op) {
    case GGML_OP_MUL_MAT_ID: return is_expert_product(tensor);
    case GGML_OP_VIEW:
    case GGML_OP_RESHAPE:
    case GGML_OP_CONT:
    case GGML_OP_UNARY:
    case GGML_OP_SQR:
    case GGML_OP_CLAMP:
    case GGML_OP_SCALE:
    case GGML_OP_ADD_ID:
    case GGML_OP_MUL: return derives_from_experts(tensor->src[0], depth - 1);
    case GGML_OP_GLU:
      return derives_from_experts(tensor->src[0], depth - 1) &&
             (tensor->src[1] == nullptr || derives_from_experts(tensor->src[1], depth - 1));
    // The sum over a token's experts; an ADD that brings anything else in (the residual) is not claimed.
    case GGML_OP_ADD: return derives_from_experts(tensor->src[1], depth - 1) && derives_from_experts(tensor->src[0], depth - 1);
    default: return false;
  }
}

bool OpClaims::claims(const ggml_tensor* op) const {
  switch (op->op) {
    case GGML_OP_NONE:
    case GGML_OP_VIEW:
    case GGML_OP_RESHAPE:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE: return true;
    case GGML_OP_REPEAT:
    case GGML_OP_GET_ROWS: return scale_root(op) != nullptr;
    default: return derives_from_experts(op, kDeriveDepthMax);
  }
}

}  // namespace kvasir::plugin
