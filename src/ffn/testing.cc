#include "ffn/testing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "ffn/device.h"

namespace kvasir::ffn::testing {
namespace {

using wire::Activation;
using wire::GateLayout;

ggml_backend_dev_t cpu() { return find_device("CPU").value(); }

void allocate(Layer& layer) {
  layer.buffer.reset(
      ggml_backend_alloc_ctx_tensors_from_buft(layer.context.get(), ggml_backend_dev_buffer_type(cpu())));
  KVASIR_CHECK(layer.buffer != nullptr);
}

void fill(ggml_tensor* t, std::mt19937& rng) {
  const auto n = static_cast<std::size_t>(ggml_nelements(t));
  std::normal_distribution<float> normal(0.f, 1.f / std::sqrt(static_cast<float>(t->ne[0])));
  if (t->ne[2] == 1 && t->ne[1] == 1) normal = std::normal_distribution<float>(1.f, 0.3f);  // a scale
  std::vector<float> values(n);
  for (float& value : values) value = normal(rng);
  if (t->type == GGML_TYPE_F32) {
    std::memcpy(t->data, values.data(), n * sizeof(float));
  } else {
    const std::vector<float> importance(static_cast<std::size_t>(t->ne[0]), 1.f);
    ggml_quantize_chunk(t->type, values.data(), t->data, 0, t->ne[1] * t->ne[2], t->ne[0], importance.data());
  }
}

// Calls visit(slot, wanted, is_matrix, n_in, n_out) for every tensor of the layout.
template <typename Visit>
void each_tensor(const wire::Recipe& r, ExpertTensors& t, Visit visit) {
  const bool split = r.gate_layout == GateLayout::kSplit, merged = r.gate_layout == GateLayout::kMerged;
  const std::int64_t n_embd = r.n_embd, n_ff = r.n_ff;
  visit(t.gate, split, 'm', n_embd, n_ff);
  visit(t.up, !merged, 'm', n_embd, n_ff);
  visit(t.gate_up, merged, 'm', n_embd, 2 * n_ff);
  visit(t.down, true, 'd', n_ff, n_embd);
  visit(t.gate_bias, r.gate_bias, 'b', 0, n_ff);
  visit(t.up_bias, !merged && r.up_bias, 'b', 0, n_ff);
  visit(t.gate_up_bias, merged && r.up_bias, 'b', 0, 2 * n_ff);
  visit(t.down_bias, r.down_bias, 'b', 0, n_embd);
  visit(t.gate_scale, r.gate_scale, 's', 0, 1);
  visit(t.up_scale, !merged && r.up_scale, 's', 0, 1);
  visit(t.gate_up_scale, merged && r.up_scale, 's', 0, 1);
  visit(t.down_scale, r.down_scale, 's', 0, 1);
}

Layer empty_layer(const wire::Recipe& recipe, ggml_type gate_up_type, ggml_type down_type, std::uint32_t n_local) {
  Layer layer{.recipe = recipe, .tensors = {}, .context = nullptr, .buffer = nullptr};
  layer.context.reset(ggml_init({ggml_tensor_overhead() * 16, nullptr, true}));
  layer.tensors.n_local = n_local;
  each_tensor(recipe, layer.tensors,
              [&](ggml_tensor*& slot, bool wanted, char kind, std::int64_t n_in, std::int64_t n_out) {
                if (!wanted) return;
                ggml_context* ctx = layer.context.get();
                if (kind == 's') slot = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n_local);
                else if (kind == 'b') slot = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_out, n_local);
                else slot = ggml_new_tensor_3d(ctx, kind == 'd' ? down_type : gate_up_type, n_in, n_out, n_local);
              });
  allocate(layer);
  return layer;
}

}  // namespace

Layer random_layer(const wire::Recipe& recipe, ggml_type gate_up_type, ggml_type down_type, std::uint32_t seed) {
  Layer layer = empty_layer(recipe, gate_up_type, down_type, recipe.n_expert);
  std::mt19937 rng(seed);
  each_tensor(recipe, layer.tensors,
              [&](ggml_tensor*& slot, bool, char, std::int64_t, std::int64_t) { if (slot) fill(slot, rng); });
  return layer;
}

Layer slice_layer(const Layer& layer, std::span<const std::uint32_t> experts) {
  const ExpertTensors& from = layer.tensors;
  const ggml_tensor* wide = from.gate_up ? from.gate_up : from.up;
  Layer out = empty_layer(layer.recipe, wide->type, from.down->type, static_cast<std::uint32_t>(experts.size()));
  for (ggml_tensor* ExpertTensors::* member :
       {&ExpertTensors::gate, &ExpertTensors::up, &ExpertTensors::gate_up, &ExpertTensors::down,
        &ExpertTensors::gate_bias, &ExpertTensors::up_bias, &ExpertTensors::gate_up_bias, &ExpertTensors::down_bias,
        &ExpertTensors::gate_scale, &ExpertTensors::up_scale, &ExpertTensors::gate_up_scale,
        &ExpertTensors::down_scale}) {
    const ggml_tensor* source = from.*member;
    if (!source) continue;
    const std::size_t slab = ggml_nbytes(source) / from.n_local;
    for (std::size_t i = 0; i < experts.size(); ++i)
      std::memcpy(static_cast<char*>((out.tensors.*member)->data) + i * slab,
                  static_cast<const char*>(source->data) + experts[i] * slab, slab);
  }
  return out;
}

std::vector<float> random_rows(std::size_t n, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) value = normal(rng);
  return values;
}

std::vector<std::int32_t> random_ids(std::uint32_t n_expert, std::uint32_t n_used, std::uint32_t n_tokens,
                                     std::mt19937& rng) {
  std::vector<std::int32_t> ids, deck(n_expert);
  std::iota(deck.begin(), deck.end(), 0);
  for (std::uint32_t token = 0; token < n_tokens; ++token) {
    std::shuffle(deck.begin(), deck.end(), rng);
    ids.insert(ids.end(), deck.begin(), deck.begin() + n_used);
  }
  return ids;
}

std::vector<float> full_call(const Layer& layer, std::span<const float> x, std::span<const std::int32_t> ids,
                             std::uint32_t n_used, int n_threads) {
  const wire::Recipe& r = layer.recipe;
  const ExpertTensors& t = layer.tensors;
  const auto n_tokens = static_cast<std::int64_t>(ids.size() / n_used);
  ggml_context_ptr context(ggml_init({ggml_tensor_overhead() * 64 + ggml_graph_overhead(), nullptr, true}));
  ggml_context* ctx = context.get();
  ggml_tensor* cur = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, r.n_embd, 1, n_tokens);
  // As in llama.cpp: the chosen ids are a strided view of the sorted ids of all experts.
  ggml_tensor* sorted = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, t.n_local, n_tokens);
  ggml_tensor* sel = ggml_view_2d(ctx, sorted, n_used, n_tokens, sorted->nb[1], 0);
  const auto path = [&](ggml_tensor* w, ggml_tensor* scale, ggml_tensor* bias, ggml_tensor* in) {
    ggml_tensor* y = ggml_mul_mat_id(ctx, w, in, sel);
    if (scale) {
      ggml_tensor* s = ggml_repeat_4d(ctx, ggml_reshape_3d(ctx, scale, 1, t.n_local, 1), 1, t.n_local, n_tokens, 1);
      y = ggml_mul(ctx, y, ggml_get_rows(ctx, s, sel));
    }
    return bias ? ggml_add_id(ctx, y, bias, sel) : y;
  };
  const auto clamp = [&](const wire::Clamp& c, ggml_tensor* v) {
    return c.enabled ? ggml_clamp(ctx, v, c.min, c.max) : v;
  };
  ggml_tensor *gate = nullptr, *up;
  if (r.gate_layout == GateLayout::kMerged) {
    ggml_tensor* both = path(t.gate_up, t.gate_up_scale, t.gate_up_bias, cur);
    gate = ggml_view_3d(ctx, both, r.n_ff, both->ne[1], both->ne[2], both->nb[1], both->nb[2], 0);
    up = ggml_view_3d(ctx, both, r.n_ff, both->ne[1], both->ne[2], both->nb[1], both->nb[2], r.n_ff * sizeof(float));
  } else {
    up = path(t.up, t.up_scale, t.up_bias, cur);
    if (t.gate) gate = path(t.gate, t.gate_scale, t.gate_bias, cur);
  }
  if (gate) gate = clamp(r.clamp_gate, gate);
  up = clamp(r.clamp_up, up);
  ggml_tensor* hidden = nullptr;
  switch (r.activation) {
    case Activation::kSwiglu: hidden = ggml_swiglu_split(ctx, gate, up); break;
    case Activation::kGeglu: hidden = ggml_geglu_split(ctx, gate, up); break;
    case Activation::kReglu: hidden = ggml_reglu_split(ctx, gate, up); break;
    case Activation::kGegluErf: hidden = ggml_geglu_erf_split(ctx, gate, up); break;
    case Activation::kGegluQuick: hidden = ggml_geglu_quick_split(ctx, gate, up); break;
    case Activation::kSwigluOai: hidden = ggml_swiglu_oai(ctx, gate, up, r.alpha, r.limit); break;
    case Activation::kSwigluClamp: hidden = ggml_swiglu_clamp(ctx, gate, up, r.limit); break;
    case Activation::kSoftCapSiluMul: {
      const auto cap = [&](const wire::SoftCap& c, ggml_tensor* v) {
        return ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, v, c.in)), c.out);
      };
      hidden = ggml_mul(ctx, ggml_mul(ctx, cap(r.cap_gate, gate), ggml_sigmoid(ctx, gate)), cap(r.cap_up, up));
      break;
    }
    case Activation::kSiluMul:
      hidden = ggml_mul(ctx, clamp(r.clamp_gate_activated, ggml_silu(ctx, gate)), up);
      break;
    case Activation::kSilu: hidden = ggml_silu(ctx, up); break;
    case Activation::kGelu: hidden = ggml_gelu(ctx, up); break;
    case Activation::kRelu: hidden = ggml_relu(ctx, up); break;
    case Activation::kReluSqr: hidden = ggml_sqr(ctx, ggml_relu(ctx, up)); break;
    case Activation::kGeluErf: hidden = ggml_gelu_erf(ctx, up); break;
    case Activation::kGeluQuick: hidden = ggml_gelu_quick(ctx, up); break;
  }
  ggml_tensor* out = path(t.down, t.down_scale, t.down_bias, hidden);
  ggml_cgraph* graph = ggml_new_graph(ctx);
  ggml_build_forward_expand(graph, out);

  const ggml_backend_ptr backend = open_backend(cpu(), n_threads).value();
  ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx, backend.get()));
  std::memcpy(cur->data, x.data(), x.size_bytes());
  for (std::int64_t token = 0; token < n_tokens; ++token)
    std::memcpy(static_cast<char*>(sorted->data) + token * sorted->nb[1], &ids[token * n_used],
                n_used * sizeof(std::int32_t));
  KVASIR_CHECK(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS);
  std::vector<float> result(static_cast<std::size_t>(ggml_nelements(out)));
  std::memcpy(result.data(), out->data, result.size() * sizeof(float));
  return result;
}

}  // namespace kvasir::ffn::testing
