#include "cli/bench_naive.h"

#include <cstring>
#include <format>

#include "ffn/device.h"

namespace kvasir::cli {

Result<std::unique_ptr<NaiveFfn>> NaiveFfn::load(const gguf::MoeModel& model, const gguf::LayerExperts& layer,
                                                 std::uint32_t n_used, int n_threads) {
  auto naive = std::make_unique<NaiveFfn>();
  KVASIR_ASSIGN(ggml_backend_dev_t cpu, ffn::find_device("CPU"));
  KVASIR_ASSIGN(naive->backend_, ffn::open_backend(cpu, n_threads));
  naive->n_used_ = n_used;
  naive->context_.reset(ggml_init({ggml_tensor_overhead() * 4, nullptr, /*no_alloc=*/true}));
  const std::int64_t n_local = layer.held.size();
  struct Part {
    gguf::ExpertRole role;
    ggml_tensor** tensor;
    const gguf::ExpertTensor* source;
  };
  Part parts[] = {{gguf::ExpertRole::kGate, &naive->gate_, nullptr},
                  {gguf::ExpertRole::kUp, &naive->up_, nullptr},
                  {gguf::ExpertRole::kDown, &naive->down_, nullptr}};
  for (Part& part : parts) {
    part.source = layer.find(part.role, gguf::ExpertPart::kWeight);
    if (!part.source)
      return fix_input(std::format("{} has no separate gate, up and down experts: the comparison needs them.", model.file_name()));
    *part.tensor = ggml_new_tensor_3d(naive->context_.get(), part.source->type, static_cast<std::int64_t>(part.source->ne[0]),
                                      static_cast<std::int64_t>(part.source->ne[1]), n_local);
  }
  naive->buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(naive->context_.get(), ggml_backend_dev_buffer_type(cpu)));
  if (!naive->buffer_) return retry_later("There is no memory for the experts of the comparison.");
  ggml_backend_buffer_set_usage(naive->buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  for (const Part& part : parts) {
    auto* data = static_cast<std::byte*>((*part.tensor)->data);
    for (std::uint32_t slab = 0; slab < layer.held.size(); ++slab)
      KVASIR_TRY(model.read_slab(*part.source, slab, {data + slab * part.source->bytes_per_expert, part.source->bytes_per_expert}));
  }
  return naive;
}

Result<NaiveFfn::Graph*> NaiveFfn::graph_for(std::int64_t n_tokens) {
  const auto [entry, is_new] = graphs_.try_emplace(n_tokens);
  Graph& g = entry->second;
  if (!is_new) return &g;
  g.context.reset(ggml_init({ggml_tensor_overhead() * 16 + ggml_graph_overhead(), nullptr, /*no_alloc=*/true}));
  ggml_context* ctx = g.context.get();
  g.x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, gate_->ne[0], 1, n_tokens);
  g.ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_used_, n_tokens);
  ggml_set_input(g.x);
  ggml_set_input(g.ids);
  ggml_tensor* up = ggml_mul_mat_id(ctx, up_, g.x, g.ids);
  ggml_tensor* gate = ggml_mul_mat_id(ctx, gate_, g.x, g.ids);
  g.out = ggml_mul_mat_id(ctx, down_, ggml_swiglu_split(ctx, gate, up), g.ids);
  ggml_set_output(g.out);
  g.graph = ggml_new_graph(ctx);
  ggml_build_forward_expand(g.graph, g.out);
  g.memory.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend_.get())));
  if (!ggml_gallocr_alloc_graph(g.memory.get(), g.graph)) {
    graphs_.erase(entry);
    return retry_later("There is no memory for the graph of the comparison.");
  }
  return &g;
}

Status NaiveFfn::compute(std::span<const float> x, std::span<const std::int32_t> ids, float* out) {
  KVASIR_ASSIGN(Graph * g, graph_for(static_cast<std::int64_t>(ids.size()) / n_used_));
  // ggml may reuse an input's memory after its last use: set before every run.
  std::memcpy(g->x->data, x.data(), x.size_bytes());
  std::memcpy(g->ids->data, ids.data(), ids.size_bytes());
  if (ggml_backend_graph_compute(backend_.get(), g->graph) != GGML_STATUS_SUCCESS) return fatal("ggml failed to compute the comparison.");
  std::memcpy(out, g->out->data, ggml_nbytes(g->out));
  return {};
}

}  // namespace kvasir::cli
