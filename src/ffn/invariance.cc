#include "ffn/invariance.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace kvasir::ffn {
namespace {

// Values in [-1, 1) from a linear congruence: the same on every machine.
std::vector<float> fixed_noise(std::size_t n) {
  std::vector<float> values(n);
  std::uint32_t state = 0x6b767372;
  for (float& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<std::int32_t>(state) >> 8) * 0x1p-23f;
  }
  return values;
}

// matrix[expert 0] times the first `n_rows` of `x`.
Result<std::vector<float>> product(ggml_backend_t backend, ggml_tensor* matrix, std::span<const float> x,
                                   std::uint32_t n_rows) {
  ggml_context_ptr context(ggml_init({ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true}));
  if (!context) return retry_later("There is no memory left to probe a kernel.");
  ggml_context* ctx = context.get();
  ggml_tensor* rows = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, matrix->ne[0], 1, n_rows);
  ggml_tensor* ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, n_rows);
  ggml_tensor* y = ggml_mul_mat_id(ctx, matrix, rows, ids);
  ggml_cgraph* graph = ggml_new_graph(ctx);
  ggml_build_forward_expand(graph, y);
  ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx, backend));
  if (!buffer) return retry_later("There is no device memory left to probe a kernel.");
  ggml_backend_tensor_set(rows, x.data(), 0, ggml_nbytes(rows));
  ggml_backend_tensor_memset(ids, 0, 0, ggml_nbytes(ids));
  if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS)
    return fatal("ggml failed to compute the probe of a kernel.");
  std::vector<float> out(static_cast<std::size_t>(ggml_nelements(y)));
  ggml_backend_tensor_get(y, out.data(), 0, ggml_nbytes(y));
  return out;
}

}  // namespace

std::uint32_t invariant_rows_limit(ggml_type type) {
  switch (type) {
    case GGML_TYPE_F32:
    case GGML_TYPE_F16:
    case GGML_TYPE_BF16:
    case GGML_TYPE_Q8_0:
    case GGML_TYPE_Q4_0:
    case GGML_TYPE_Q4_1:
    case GGML_TYPE_Q5_0:
    case GGML_TYPE_Q5_1:
    case GGML_TYPE_IQ4_NL:
    case GGML_TYPE_MXFP4: return kInvariantRowsMax;
    case GGML_TYPE_Q2_K:
    case GGML_TYPE_Q3_K:
    case GGML_TYPE_Q4_K:
    case GGML_TYPE_Q5_K:
    case GGML_TYPE_Q6_K:
    case GGML_TYPE_IQ4_XS:
    case GGML_TYPE_IQ3_S:
    case GGML_TYPE_IQ2_XXS: return 7;
    default: return 1;
  }
}

Result<std::uint32_t> probe_invariant_rows(ggml_backend_t backend, ggml_tensor* matrix, std::uint32_t limit) {
  if (limit <= 1) return 1u;
  const auto n_in = static_cast<std::size_t>(matrix->ne[0]), n_out = static_cast<std::size_t>(matrix->ne[1]);
  const std::vector<float> x = fixed_noise(n_in * limit);
  std::vector<float> alone;
  for (std::uint32_t row = 0; row < limit; ++row) {
    KVASIR_ASSIGN(const std::vector<float> y, product(backend, matrix, std::span(x).subspan(row * n_in, n_in), 1));
    alone.insert(alone.end(), y.begin(), y.end());
  }
  for (std::uint32_t n = 2; n <= limit; ++n) {
    KVASIR_ASSIGN(const std::vector<float> y, product(backend, matrix, x, n));
    if (std::memcmp(y.data(), alone.data(), n * n_out * sizeof(float)) != 0) return n - 1;
  }
  return limit;
}

Result<std::uint32_t> InvariantRows::of(ggml_backend_t backend, const wire::Recipe& recipe,
                                        const ExpertTensors& tensors) {
  const bool merged = recipe.gate_layout == wire::GateLayout::kMerged;
  std::uint32_t rows = kInvariantRowsMax;
  for (ggml_tensor* matrix : {recipe.gate_layout == wire::GateLayout::kSplit ? tensors.gate : nullptr,
                              merged ? tensors.gate_up : tensors.up, tensors.down}) {
    if (!matrix) continue;
    const auto [entry, is_new] = known_.try_emplace({matrix->type, matrix->ne[0], matrix->ne[1]}, 0u);
    if (is_new) {
      auto probed = probe_invariant_rows(backend, matrix, invariant_rows_limit(matrix->type));
      if (!probed) {
        known_.erase(entry);
        return std::unexpected(std::move(probed).error());
      }
      entry->second = *probed;
    }
    rows = std::min(rows, entry->second);
  }
  return rows;
}

}  // namespace kvasir::ffn
