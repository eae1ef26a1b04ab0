#include "plugin/backend.h"

#include <ggml-backend.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <format>
#include <limits>

#include "ffn/device.h"
#include "plugin/layer_identity.h"

namespace kvasir::plugin {
namespace {

// Below this many values in a run of local nodes (weights and sums of a few tokens), one
// thread finishes before others would have woken: about 50 µs of f32 arithmetic.
constexpr std::int64_t kSingleThreadValuesMax = 1 << 18;
constexpr std::size_t kLocalNodesMax = 4096;

bool overlap(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
  const auto* a0 = static_cast<const std::byte*>(a);
  const auto* b0 = static_cast<const std::byte*>(b);
  return a0 < b0 + b_bytes && b0 < a0 + a_bytes;
}

Status status_of(ggml_status status) {
  if (status == GGML_STATUS_SUCCESS) return {};
  return fatal(std::format("ggml's CPU backend failed: {}.", ggml_status_to_string(status)));
}

}  // namespace

Result<std::unique_ptr<Backend>> Backend::create(Runtime& runtime) {
  std::unique_ptr<Backend> backend(new Backend(runtime));
  KVASIR_ASSIGN(ggml_backend_dev_t cpu, ffn::find_device("CPU"));
  KVASIR_ASSIGN(backend->cpu_, ffn::open_backend(cpu, backend->n_threads_));
  KVASIR_ASSIGN(backend->cpu_single_, ffn::open_backend(cpu, 1));
  const std::size_t bytes = ggml_graph_overhead_custom(kLocalNodesMax, false) + 1024;
  backend->graph_context_.reset(ggml_init({.mem_size = bytes, .mem_buffer = nullptr, .no_alloc = true}));
  if (!backend->graph_context_) return fatal("out of memory for a graph of local nodes.");
  KVASIR_ASSIGN(dispatch::Dispatcher * dispatcher, runtime.dispatcher());
  backend->driver_ = dispatcher->make_driver();
  return backend;
}

void Backend::set_n_threads(int n_threads) {
  if (n_threads < 1 || n_threads == n_threads_) return;
  n_threads_ = n_threads;
  ffn::set_threads(cpu_.get(), n_threads);
  if (engine_) engine_->set_n_threads(n_threads);
}

Result<ffn::Engine*> Backend::engine() {
  if (!engine_) {
    KVASIR_ASSIGN(engine_, ffn::Engine::create({.n_threads = n_threads_, .numerics = runtime_.config().dispatch.numerics}));
  }
  return engine_.get();
}

Status Backend::compute_whole(ggml_cgraph* graph) { return status_of(ggml_backend_graph_compute(cpu_.get(), graph)); }

Status Backend::compute_nodes(std::vector<ggml_tensor*>& nodes) {
  std::int64_t values = 0;
  for (const ggml_tensor* node : nodes)
    values += ggml_nelements(node) + (node->op == GGML_OP_MUL_MAT ? ggml_nelements(node->src[0]) : 0);
  for (std::size_t begin = 0; begin < nodes.size(); begin += kLocalNodesMax) {
    const std::size_t end = std::min(nodes.size(), begin + kLocalNodesMax);
    ggml_reset(graph_context_.get());
    ggml_cgraph* graph = ggml_new_graph_custom(graph_context_.get(), kLocalNodesMax, false);
    for (std::size_t i = begin; i < end; ++i) ggml_graph_add_node(graph, nodes[i]);
    ggml_backend_t cpu = values <= kSingleThreadValuesMax ? cpu_single_.get() : cpu_.get();
    KVASIR_TRY(status_of(ggml_backend_graph_compute(cpu, graph)));
  }
  nodes.clear();
  return {};
}

void Backend::capture_weights(const ggml_tensor* weights, Job& job) {
  job.weights.clear();
  job.nan_rows.clear();
  if (weights == nullptr) return;
  for (std::int64_t t = 0; t < weights->ne[2]; ++t) {
    for (std::int64_t u = 0; u < weights->ne[1]; ++u) {
      const auto* at = static_cast<const std::byte*>(weights->data) + t * weights->nb[2] + u * weights->nb[1];
      float weight = *reinterpret_cast<const float*>(at);
      if (!std::isfinite(weight)) {  // does not travel
        weight = 0;
        job.nan_rows.push_back(static_cast<std::uint32_t>(t));
      }
      job.weights.push_back(weight);
    }
  }
}

Status Backend::capture(const ExpertFfn& ffn, bool copy_rows, Job& job) {
  const ggml_tensor* cur = ffn.cur;
  const ggml_tensor* ids = ffn.ids;
  const auto n_used = static_cast<std::uint32_t>(ids->ne[0]);
  const auto n_tokens = static_cast<std::uint32_t>(ids->ne[1]);
  const auto rows_per_token = static_cast<std::uint32_t>(cur->ne[1]);  // 1, or n_used: a row of its own for each pair

  job.pairs.clear();
  job.pairs.reserve(std::size_t{n_used} * n_tokens);
  for (std::uint32_t t = 0; t < n_tokens; ++t) {
    const auto* row_ids = reinterpret_cast<const std::int32_t*>(static_cast<const std::byte*>(ids->data) + t * ids->nb[1]);
    for (std::uint32_t u = 0; u < n_used; ++u) {
      const std::int32_t id = row_ids[u];
      if (id < 0 || static_cast<std::uint32_t>(id) >= ffn.recipe.n_expert)
        return fix_input(std::format("the router chose expert {} of {} in layer {}.", id, ffn.recipe.n_expert, ffn.layer));
      job.pairs.push_back({rows_per_token == 1 ? t : t * n_used + u, static_cast<std::uint32_t>(id)});
    }
  }

  capture_weights(ffn.weights, job);
  job.n_rows = rows_per_token * n_tokens;
  const std::size_t n_embd = ffn.recipe.n_embd;
  const bool even_stride = rows_per_token == 1 || n_tokens == 1 || cur->nb[2] == cur->nb[1] * rows_per_token;
  // The scheduler may have given the result the memory of the rows: they are dead to it.
  if (overlap(cur->data, ggml_nbytes(cur), ffn.out->data, ggml_nbytes(ffn.out))) copy_rows = true;
  if (copy_rows || !even_stride) {
    job.rows_copy.resize(job.n_rows * n_embd);
    float* to = job.rows_copy.data();
    for (std::uint32_t t = 0; t < n_tokens; ++t)
      for (std::uint32_t r = 0; r < rows_per_token; ++r, to += n_embd)
        std::memcpy(to, static_cast<const std::byte*>(cur->data) + t * cur->nb[2] + r * cur->nb[1], n_embd * sizeof(float));
    job.rows = job.rows_copy.data();
    job.row_stride = n_embd;
  } else {
    job.rows = static_cast<const float*>(cur->data);
    job.row_stride = (rows_per_token == 1 ? cur->nb[2] : cur->nb[1]) / sizeof(float);
  }
  job.captured = true;
  return {};
}

Status Backend::compute_local_pairs(const ExpertFfn& ffn, const dispatch::Round& round, std::span<const std::uint32_t> indices) {
  KVASIR_ASSIGN(ffn::Engine * engine, this->engine());
  const std::size_t n_embd = ffn.recipe.n_embd;
  local_pairs_.clear();
  for (std::uint32_t i : indices) local_pairs_.push_back({round.pairs[i].row, round.pairs[i].expert});
  const ffn::RowsView rows{round.rows, round.row_stride, round.n_rows};
  // Any order of indices may come in; only all pairs in their own order lie where `out` wants them.
  const bool in_place = !round.weighted() && indices.size() == round.pairs.size() && std::ranges::is_sorted(indices);
  if (in_place) return engine->compute(ffn.recipe, ffn.tensors, rows, local_pairs_, round.out);
  local_rows_.resize(indices.size() * n_embd);
  KVASIR_TRY(engine->compute(ffn.recipe, ffn.tensors, rows, local_pairs_, local_rows_.data()));
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const float* row = local_rows_.data() + i * n_embd;
    if (!round.weighted()) {
      std::memcpy(round.out + indices[i] * n_embd, row, n_embd * sizeof(float));
      continue;
    }
    float* sum = round.out + round.pairs[indices[i]].row * n_embd;
    const float weight = round.weights[indices[i]];
    for (std::size_t j = 0; j < n_embd; ++j) sum[j] += weight * row[j];
  }
  return {};
}

Status Backend::compute_ffn(const ExpertFfn& ffn, Job& job, const EarlyNodes& early) {
  KVASIR_ASSIGN(const dispatch::Layer* layer, runtime_.layer_of(ffn));
  const dispatch::Round round{.layer = layer,
                              .rows = job.rows,
                              .row_stride = job.row_stride,
                              .n_rows = job.n_rows,
                              .pairs = job.pairs,
                              .weights = job.weights,
                              .out = static_cast<float*>(ffn.out->data)};
  const auto here = [&](const dispatch::Round& r, std::span<const std::uint32_t> indices) { return compute_local_pairs(ffn, r, indices); };
  KVASIR_TRY(shadows_.begin(early));
  if (shadows_.done()) {
    KVASIR_TRY(driver_->run(round, here));
  } else {
    runtime_.count_overlapped();
    const auto piece = [&]() -> Result<bool> {
      KVASIR_TRY(shadows_.compute_piece(cpu_.get()));
      return !shadows_.done();
    };
    KVASIR_TRY(driver_->run(round, here, piece));
  }
  for (std::uint32_t row : job.nan_rows)
    std::fill_n(round.out + row * std::size_t{ffn.recipe.n_embd}, ffn.recipe.n_embd, std::numeric_limits<float>::quiet_NaN());
  return {};
}

Status Backend::compute(ggml_cgraph* graph) {
  if (runtime_.config().dispatch.local == dispatch::LocalPolicy::kOnly) {
    runtime_.count_local_split();
    KVASIR_TRY(check_computable_here(graph, runtime_.config().replica));
    return compute_whole(graph);
  }
  const GraphPlan plan = plan_graph(graph, runtime_.config().dispatch.numerics == wire::Numerics::kFast);
  for (const std::string& text : plan.unknown) runtime_.note_unknown(text);
  if (!plan.unknown.empty()) KVASIR_TRY(check_computable_here(graph, runtime_.config().replica));
  if (plan.ffns.empty()) {
    runtime_.count_local_split();
    return compute_whole(graph);
  }

  const bool overlap = runtime_.config().overlap;
  const std::vector<EarlyNodes> early = overlap ? find_early_nodes(plan) : std::vector<EarlyNodes>(plan.ffns.size());
  KVASIR_TRY(shadows_.begin({}));  // of the last graph
  jobs_.resize(std::max(jobs_.size(), plan.ffns.size()));
  for (Job& job : jobs_) job.captured = false;
  std::vector<ggml_tensor*> nodes;
  for (const GraphPlan::Step& step : plan.steps) {
    if (step.capture >= 0) {
      // Local nodes run between here and the FFN's place, and may be given the rows' memory.
      KVASIR_TRY(compute_nodes(nodes));
      KVASIR_TRY(capture(plan.ffns[step.capture], /*copy_rows=*/true, jobs_[step.capture]));
    } else if (step.ffn >= 0) {
      KVASIR_TRY(compute_nodes(nodes));
      Job& job = jobs_[step.ffn];
      if (!job.captured) KVASIR_TRY(capture(plan.ffns[step.ffn], /*copy_rows=*/false, job));
      KVASIR_TRY(compute_ffn(plan.ffns[step.ffn], job, early[static_cast<std::size_t>(step.ffn)]));
    } else if (shadows_.covers(step.node)) {
      // What comes before it may still read the memory that its result belongs in.
      KVASIR_TRY(compute_nodes(nodes));
      shadows_.put(step.node);
    } else {
      nodes.push_back(step.node);
    }
  }
  return compute_nodes(nodes);
}

}  // namespace kvasir::plugin
