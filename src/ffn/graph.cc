#include "ffn/graph.h"

#include <format>
#include <functional>

#include "base/check.h"

namespace kvasir::ffn {
namespace {

using wire::Activation;
using wire::GateLayout;

// The longest recipe (split gate, all scales, biases and clamps) has 31 tensors with views.
constexpr std::size_t kTensorsMax = 48;

// The operations on one path: matrix, scale, bias.
class Builder {
 public:
  Builder(ggml_context* ctx, ggml_tensor* ids) : ctx_(ctx), ids_(ids) {}

  ggml_tensor* path(ggml_tensor* matrix, ggml_tensor* scale, ggml_tensor* bias, ggml_tensor* x) {
    ggml_tensor* y = ggml_mul_mat_id(ctx_, matrix, x, ids_);
    if (scale) {
      const std::int64_t n_pairs = ids_->ne[1];
      ggml_tensor* table = ggml_reshape_2d(ctx_, scale, 1, ggml_nelements(scale));
      ggml_tensor* picked = ggml_get_rows(ctx_, table, ggml_reshape_1d(ctx_, ids_, n_pairs));
      y = ggml_mul(ctx_, y, ggml_reshape_3d(ctx_, picked, 1, 1, n_pairs));
    }
    if (bias) y = ggml_add_id(ctx_, y, bias, ids_);
    return y;
  }

  ggml_tensor* clamp(const wire::Clamp& clamp, ggml_tensor* x) {
    return clamp.enabled ? ggml_clamp(ctx_, x, clamp.min, clamp.max) : x;
  }

  ggml_tensor* cap(const wire::SoftCap& cap, ggml_tensor* x) {
    return ggml_scale(ctx_, ggml_tanh(ctx_, ggml_scale(ctx_, x, cap.in)), cap.out);
  }

  ggml_tensor* gated(const wire::Recipe& r, ggml_tensor* gate, ggml_tensor* up) {
    switch (r.activation) {
      case Activation::kSwiglu: return ggml_swiglu_split(ctx_, gate, up);
      case Activation::kGeglu: return ggml_geglu_split(ctx_, gate, up);
      case Activation::kReglu: return ggml_reglu_split(ctx_, gate, up);
      case Activation::kGegluErf: return ggml_geglu_erf_split(ctx_, gate, up);
      case Activation::kGegluQuick: return ggml_geglu_quick_split(ctx_, gate, up);
      case Activation::kSwigluOai: return ggml_swiglu_oai(ctx_, gate, up, r.alpha, r.limit);
      case Activation::kSwigluClamp: return ggml_swiglu_clamp(ctx_, gate, up, r.limit);
      case Activation::kSiluMul: return ggml_mul(ctx_, clamp(r.clamp_gate_activated, ggml_silu(ctx_, gate)), up);
      case Activation::kSoftCapSiluMul:
        return ggml_mul(ctx_, ggml_mul(ctx_, cap(r.cap_gate, gate), ggml_sigmoid(ctx_, gate)), cap(r.cap_up, up));
      default: return nullptr;
    }
  }

  ggml_tensor* ungated(const wire::Recipe& r, ggml_tensor* up) {
    switch (r.activation) {
      case Activation::kSilu: return ggml_silu(ctx_, up);
      case Activation::kGelu: return ggml_gelu(ctx_, up);
      case Activation::kRelu: return ggml_relu(ctx_, up);
      case Activation::kReluSqr: return ggml_sqr(ctx_, ggml_relu(ctx_, up));
      case Activation::kGeluErf: return ggml_gelu_erf(ctx_, up);
      case Activation::kGeluQuick: return ggml_gelu_quick(ctx_, up);
      default: return nullptr;
    }
  }

  ggml_tensor* hidden(const wire::Recipe& r, const ExpertTensors& t, ggml_tensor* x) {
    if (r.gate_layout == GateLayout::kNone) return ungated(r, clamp(r.clamp_up, path(t.up, t.up_scale, t.up_bias, x)));
    ggml_tensor *gate, *up;
    if (r.gate_layout == GateLayout::kMerged) {
      ggml_tensor* both = path(t.gate_up, t.gate_up_scale, t.gate_up_bias, x);
      const std::int64_t n_ff = r.n_ff;
      gate = ggml_view_3d(ctx_, both, n_ff, both->ne[1], both->ne[2], both->nb[1], both->nb[2], 0);
      up = ggml_view_3d(ctx_, both, n_ff, both->ne[1], both->ne[2], both->nb[1], both->nb[2],
                        static_cast<std::size_t>(n_ff) * both->nb[0]);
    } else {
      up = path(t.up, t.up_scale, t.up_bias, x);
      gate = path(t.gate, t.gate_scale, t.gate_bias, x);
    }
    return gated(r, clamp(r.clamp_gate, gate), clamp(r.clamp_up, up));
  }

 private:
  ggml_context* ctx_;
  ggml_tensor* ids_;
};

// Only what the recipe names: a slice may hold side tensors that its architecture never uses.
ExpertTensors named_by(const wire::Recipe& r, const ExpertTensors& all) {
  const bool split = r.gate_layout == GateLayout::kSplit, merged = r.gate_layout == GateLayout::kMerged;
  const auto when = [](bool named, ggml_tensor* t) { return named ? t : nullptr; };
  return {.gate = when(split, all.gate),
          .up = when(!merged, all.up),
          .gate_up = when(merged, all.gate_up),
          .down = all.down,
          .gate_bias = when(split && r.gate_bias, all.gate_bias),
          .up_bias = when(!merged && r.up_bias, all.up_bias),
          .gate_up_bias = when(merged && r.up_bias, all.gate_up_bias),
          .down_bias = when(r.down_bias, all.down_bias),
          .gate_scale = when(split && r.gate_scale, all.gate_scale),
          .up_scale = when(!merged && r.up_scale, all.up_scale),
          .gate_up_scale = when(merged && r.up_scale, all.gate_up_scale),
          .down_scale = when(r.down_scale, all.down_scale),
          .n_local = all.n_local};
}

}  // namespace

std::size_t GraphKeyHash::operator()(const GraphKey& key) const {
  const std::size_t h = std::hash<const void*>{}(key.tensors.down);
  return h ^ (key.n_pairs * 0x9e3779b97f4a7c15u) ^ (static_cast<std::size_t>(key.recipe.activation) << 56);
}

std::uint64_t arena_bytes_per_pair(const wire::Recipe& r) {
  // x, out, and four tensors of n_ff (a product, its successor, the other path, the hidden
  // values); merged and scaled paths need two more. ids and scales: 16 bytes.
  return (std::uint64_t{3} * r.n_embd + std::uint64_t{6} * r.n_ff + 4) * sizeof(float);
}

Result<FfnGraph> FfnGraph::build(const GraphKey& key, ggml_backend_dev_t device) {
  const wire::Recipe& r = key.recipe;
  const ExpertTensors t = named_by(r, key.tensors);
  FfnGraph g;
  g.context.reset(ggml_init({ggml_tensor_overhead() * kTensorsMax + ggml_graph_overhead_custom(kTensorsMax, false),
                             nullptr, /*no_alloc=*/true}));
  ggml_context* ctx = g.context.get();
  if (!ctx) return retry_later("There is no memory left for another graph.");
  g.x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, r.n_embd, 1, key.n_pairs);
  g.ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, key.n_pairs);
  ggml_set_input(g.x);
  ggml_set_input(g.ids);

  Builder b(ctx, g.ids);
  ggml_tensor* hidden = b.hidden(r, t, g.x);
  KVASIR_CHECK(hidden != nullptr);  // Engine::check has matched activation and layout
  g.out = b.path(t.down, t.down_scale, t.down_bias, hidden);
  ggml_set_output(g.out);
  g.graph = ggml_new_graph_custom(ctx, kTensorsMax, false);
  ggml_build_forward_expand(g.graph, g.out);

  for (int i = 0; i < ggml_graph_n_nodes(g.graph); ++i) {
    const ggml_tensor* node = ggml_graph_node(g.graph, i);
    if (!ggml_backend_dev_supports_op(device, node)) {
      return retry_elsewhere(std::format("The device {} cannot compute {} on {}, which this layer needs.",
                                         ggml_backend_dev_name(device), ggml_op_desc(node),
                                         node->src[0] ? ggml_type_name(node->src[0]->type) : "this shape"));
    }
  }
  return g;
}

}  // namespace kvasir::ffn
