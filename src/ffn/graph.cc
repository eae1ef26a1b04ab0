#include "ffn/graph.h"

#include <format>
#include <functional>

#include "base/check.h"

namespace kvasir::ffn {
namespace {

// The longest recipe (split gate, all scales, biases and clamps) has 31 tensors with views.
constexpr std::size_t kTensorsMax = 48;

// matrix · x [* scale] [+ bias] for rows whose experts are `ids` [1, n_pairs].
ggml_tensor* stacked_path(ggml_context* ctx, ggml_tensor* ids, const MatrixTensors& m, ggml_tensor* x) {
  ggml_tensor* y = ggml_mul_mat_id(ctx, m.matrix, x, ids);
  if (m.scale) {
    const std::int64_t n_pairs = ids->ne[1];
    ggml_tensor* table = ggml_reshape_2d(ctx, m.scale, 1, ggml_nelements(m.scale));
    ggml_tensor* picked = ggml_get_rows(ctx, table, ggml_reshape_1d(ctx, ids, n_pairs));
    y = ggml_mul(ctx, y, ggml_reshape_3d(ctx, picked, 1, 1, n_pairs));
  }
  if (m.bias) y = ggml_add_id(ctx, y, m.bias, ids);
  return y;
}

}  // namespace

MatrixTensors MatrixTensors::of(const wire::Recipe& r, const ExpertTensors& t, MatrixRole role) {
  const auto when = [](bool named, ggml_tensor* tensor) { return named ? tensor : nullptr; };
  switch (role) {
    case MatrixRole::kGate: return {t.gate, when(r.gate_scale, t.gate_scale), when(r.gate_bias, t.gate_bias)};
    case MatrixRole::kUp: return {t.up, when(r.up_scale, t.up_scale), when(r.up_bias, t.up_bias)};
    case MatrixRole::kGateUp: return {t.gate_up, when(r.up_scale, t.gate_up_scale), when(r.up_bias, t.gate_up_bias)};
    case MatrixRole::kDown: return {t.down, when(r.down_scale, t.down_scale), when(r.down_bias, t.down_bias)};
  }
  return {};
}

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
  FfnGraph g;
  g.context.reset(ggml_init({ggml_tensor_overhead() * kTensorsMax + ggml_graph_overhead_custom(kTensorsMax, false),
                             nullptr, /*no_alloc=*/true}));
  ggml_context* ctx = g.context.get();
  if (!ctx) return retry_later("There is no memory left for another graph.");
  g.x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, r.n_embd, 1, key.n_pairs);
  g.ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, key.n_pairs);
  ggml_set_input(g.x);
  ggml_set_input(g.ids);

  g.out = build_ffn(ctx, r, g.x, [&](MatrixRole role, ggml_tensor* x) {
    return stacked_path(ctx, g.ids, MatrixTensors::of(r, key.tensors, role), x);
  });
  KVASIR_CHECK(g.out != nullptr);  // Engine::check has matched activation and layout
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
