#include "ffn/recipe_ops.h"

namespace kvasir::ffn {
namespace {

using wire::Activation;
using wire::GateLayout;

class Builder {
 public:
  Builder(ggml_context* ctx, const FfnPath& path) : ctx_(ctx), path_(path) {}

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

  ggml_tensor* hidden(const wire::Recipe& r, ggml_tensor* x) {
    if (r.gate_layout == GateLayout::kNone) return ungated(r, clamp(r.clamp_up, path_(MatrixRole::kUp, x)));
    ggml_tensor *gate, *up;
    if (r.gate_layout == GateLayout::kMerged) {
      ggml_tensor* both = path_(MatrixRole::kGateUp, x);
      const std::int64_t n_ff = r.n_ff;
      gate = ggml_view_3d(ctx_, both, n_ff, both->ne[1], both->ne[2], both->nb[1], both->nb[2], 0);
      up = ggml_view_3d(ctx_, both, n_ff, both->ne[1], both->ne[2], both->nb[1], both->nb[2],
                        static_cast<std::size_t>(n_ff) * both->nb[0]);
    } else {
      up = path_(MatrixRole::kUp, x);
      gate = path_(MatrixRole::kGate, x);
    }
    return gated(r, clamp(r.clamp_gate, gate), clamp(r.clamp_up, up));
  }

 private:
  ggml_context* ctx_;
  const FfnPath& path_;
};

}  // namespace

ggml_tensor* build_ffn(ggml_context* ctx, const wire::Recipe& recipe, ggml_tensor* x, const FfnPath& path) {
  ggml_tensor* hidden = Builder(ctx, path).hidden(recipe, x);
  return hidden ? path(MatrixRole::kDown, hidden) : nullptr;
}

}  // namespace kvasir::ffn
