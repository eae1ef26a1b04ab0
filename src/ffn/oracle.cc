#include "ffn/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>

#include "base/check.h"
#include "ggml.h"

namespace kvasir::ffn {
namespace {

using wire::Activation;
using wire::GateLayout;

// Independent sums, so that the compiler may use vectors without being allowed to reorder.
constexpr std::size_t kLanes = 8;

template <typename T>
double dot(const float* w, const T* x, std::size_t n) {
  double lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += double{w[i + lane]} * double{x[i + lane]};
  double sum = 0;
  for (double lane : lanes) sum += lane;
  for (; i < n; ++i) sum += double{w[i]} * double{x[i]};
  return sum;
}

double activate(const wire::Recipe& r, double gate, double up) {
  const auto silu = [](double v) { return v / (1 + std::exp(-v)); };
  const auto gelu_tanh = [](double v) {
    return 0.5 * v * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (v + 0.044715 * v * v * v)));
  };
  const auto gelu_erf = [](double v) { return 0.5 * v * (1 + std::erf(v / std::numbers::sqrt2)); };
  const auto gelu_quick = [](double v) { return v / (1 + std::exp(-1.702 * v)); };
  const auto relu = [](double v) { return std::max(v, 0.0); };
  const auto clamp = [](const wire::Clamp& c, double v) {
    return c.enabled ? std::clamp(v, double{c.min}, double{c.max}) : v;
  };
  gate = clamp(r.clamp_gate, gate);
  up = clamp(r.clamp_up, up);
  switch (r.activation) {
    case Activation::kSwiglu: return silu(gate) * up;
    case Activation::kGeglu: return gelu_tanh(gate) * up;
    case Activation::kReglu: return relu(gate) * up;
    case Activation::kGegluErf: return gelu_erf(gate) * up;
    case Activation::kGegluQuick: return gelu_quick(gate) * up;
    case Activation::kSwigluOai: {
      const double x = std::min(gate, double{r.limit});
      const double y = std::clamp(up, -double{r.limit}, double{r.limit});
      return x / (1 + std::exp(-r.alpha * x)) * (y + 1);
    }
    case Activation::kSwigluClamp:
      return silu(std::min(gate, double{r.limit})) * std::clamp(up, -double{r.limit}, double{r.limit});
    case Activation::kSiluMul: return clamp(r.clamp_gate_activated, silu(gate)) * up;
    case Activation::kSoftCapSiluMul: {
      const auto cap = [](const wire::SoftCap& c, double x) { return std::tanh(x * c.in) * c.out; };
      return cap(r.cap_gate, gate) / (1 + std::exp(-gate)) * cap(r.cap_up, up);
    }
    case Activation::kSilu: return silu(up);
    case Activation::kGelu: return gelu_tanh(up);
    case Activation::kRelu: return relu(up);
    case Activation::kReluSqr: return relu(up) * relu(up);
    case Activation::kGeluErf: return gelu_erf(up);
    case Activation::kGeluQuick: return gelu_quick(up);
  }
  KVASIR_CHECK(false);
}

}  // namespace

ExpertOracle::Path ExpertOracle::make_path(const ggml_tensor* matrix, const ggml_tensor* scale, const ggml_tensor* bias,
                                           std::uint32_t expert) {
  const auto n_in = static_cast<std::size_t>(matrix->ne[0]), n_out = static_cast<std::size_t>(matrix->ne[1]);
  Path path{.n_in = n_in, .matrix = std::vector<float>(n_in * n_out), .bias = {}};
  const auto* slab = static_cast<const char*>(matrix->data) + expert * matrix->nb[2];
  if (matrix->type == GGML_TYPE_F32) {
    std::memcpy(path.matrix.data(), slab, path.matrix.size() * sizeof(float));
  } else {
    const auto* traits = ggml_get_type_traits(matrix->type);
    for (std::size_t row = 0; row < n_out; ++row)
      traits->to_float(slab + row * matrix->nb[1], path.matrix.data() + row * n_in, matrix->ne[0]);
  }
  if (scale) path.scale = static_cast<const float*>(scale->data)[expert];
  if (bias) {
    const auto* first = static_cast<const float*>(bias->data) + expert * n_out;
    path.bias.assign(first, first + n_out);
  }
  return path;
}

template <typename T>
void ExpertOracle::Path::apply(std::span<const T> x, std::span<double> out) const {
  for (std::size_t row = 0; row < out.size(); ++row) {
    out[row] = dot(matrix.data() + row * n_in, x.data(), n_in) * scale;
    if (!bias.empty()) out[row] += double{bias[row]};
  }
}

ExpertOracle::ExpertOracle(const wire::Recipe& r, const ExpertTensors& t, std::uint32_t expert) : recipe_(r) {
  const auto when = [](bool named, const ggml_tensor* tensor) { return named ? tensor : nullptr; };
  if (r.gate_layout == GateLayout::kMerged) {
    up_ = make_path(t.gate_up, when(r.up_scale, t.gate_up_scale), when(r.up_bias, t.gate_up_bias), expert);
  } else {
    up_ = make_path(t.up, when(r.up_scale, t.up_scale), when(r.up_bias, t.up_bias), expert);
    if (r.gate_layout == GateLayout::kSplit)
      gate_ = make_path(t.gate, when(r.gate_scale, t.gate_scale), when(r.gate_bias, t.gate_bias), expert);
  }
  down_ = make_path(t.down, when(r.down_scale, t.down_scale), when(r.down_bias, t.down_bias), expert);
}

void ExpertOracle::compute(std::span<const float> x, std::span<double> out) const {
  const std::size_t n_ff = recipe_.n_ff;
  const bool merged = recipe_.gate_layout == GateLayout::kMerged, split = recipe_.gate_layout == GateLayout::kSplit;
  std::vector<double> up(merged ? 2 * n_ff : n_ff), gate(split ? n_ff : 0), hidden(n_ff);
  up_.apply(x, std::span(up));
  if (split) gate_.apply(x, std::span(gate));
  for (std::size_t i = 0; i < n_ff; ++i)
    hidden[i] = merged ? activate(recipe_, up[i], up[n_ff + i]) : activate(recipe_, split ? gate[i] : up[i], up[i]);
  down_.apply(std::span<const double>(hidden), out);
}

}  // namespace kvasir::ffn
