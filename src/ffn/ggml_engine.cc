#include "ffn/ggml_engine.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <format>

#include "base/check.h"
#include "ffn/device.h"

namespace kvasir::ffn {
namespace {

// One expert's rows stay whole whatever it takes, up to this.
constexpr std::uint64_t kArenaBytesMax = 2ull << 30;
// Decode asks for the same few shapes in every layer; a prompt's shape hardly ever recurs.
constexpr std::uint32_t kCachedPairsMax = 64;
constexpr std::size_t kPerExpertGraphsMax = 4;  // up to 16 MiB of device memory each
constexpr std::size_t kCachedGraphsMax = 1024;  // about 25 KiB of host memory each

}  // namespace

GgmlEngine::GgmlEngine(ggml_backend_dev_t device, ggml_backend_ptr backend, wire::Numerics numerics, int n_threads,
                       std::uint64_t arena_bytes_target)
    : device_(device),
      backend_(std::move(backend)),
      numerics_(numerics),
      arena_bytes_target_(arena_bytes_target),
      arena_(ggml_gallocr_new(ggml_backend_dev_buffer_type(device))),
      n_threads_(n_threads) {}

Status GgmlEngine::compute(const wire::Recipe& recipe, const ExpertTensors& tensors, RowsView rows,
                           std::span<const LocalPair> pairs, float* out) {
  return compute(numerics_, recipe, tensors, rows, PlacedPairs{pairs, {}}, out);
}

Status GgmlEngine::compute(wire::Numerics numerics, const wire::Recipe& recipe, const ExpertTensors& tensors,
                           RowsView rows, std::span<const LocalPair> pairs, float* out) {
  return compute(numerics, recipe, tensors, rows, PlacedPairs{pairs, {}}, out);
}

Status GgmlEngine::compute_fast(const wire::Recipe& recipe, std::span<const ExpertTensors> copies, RowsView rows,
                                std::span<const LocalPair> pairs, float* out) {
  return compute_fast(recipe, copies, rows, PlacedPairs{pairs, {}}, out);
}

Status GgmlEngine::compute(wire::Numerics numerics, const wire::Recipe& recipe, const ExpertTensors& tensors,
                           RowsView rows, PlacedPairs placed, float* out) {
  const std::span<const LocalPair> pairs = placed.pairs;
  if (pairs.empty()) return {};
  KVASIR_CHECK(pairs.size() <= wire::kExecPairsMax && rows.row_stride >= recipe.n_embd);
  for (const LocalPair& pair : pairs) KVASIR_CHECK(pair.row < rows.n_rows && pair.expert < tensors.n_local);

  const std::uint64_t pairs_target =
      std::clamp<std::uint64_t>(arena_bytes_target_ / arena_bytes_per_pair(recipe), 1, wire::kExecPairsMax);
  CallPlan& plan = call_plan_;
  if (numerics == wire::Numerics::kInvariant) {
    KVASIR_ASSIGN(const std::uint32_t chunk, invariant_rows_.of(backend_.get(), recipe, tensors));
    plan.invariant(pairs, tensors.n_local, chunk, static_cast<std::uint32_t>(pairs_target));
  } else {
    plan.whole_experts(pairs, tensors.n_local, static_cast<std::uint32_t>(pairs_target));
  }
  std::uint32_t begin = 0;
  for (std::uint32_t end : plan.ends) {
    KVASIR_TRY(call(recipe, tensors, rows, placed, plan.order, begin, end, out));
    begin = end;
  }
  return {};
}

Status GgmlEngine::compute_fast(const wire::Recipe& recipe, std::span<const ExpertTensors> copies, RowsView rows,
                                PlacedPairs placed, float* out) {
  const std::span<const LocalPair> pairs = placed.pairs;
  if (pairs.empty()) return {};
  KVASIR_CHECK(!copies.empty() && pairs.size() <= wire::kExecPairsMax && rows.row_stride >= recipe.n_embd);
  for (const LocalPair& pair : pairs) KVASIR_CHECK(pair.row < rows.n_rows && pair.expert < copies[0].n_local);
  call_plan_.by_expert(pairs, copies[0].n_local);
  std::size_t n_experts = 1;
  const std::vector<std::uint32_t>& order = call_plan_.order;
  for (std::size_t i = 1; i < order.size(); ++i) n_experts += pairs[order[i]].expert != pairs[order[i - 1]].expert;
  const FastPlan& plan = fast_plans_[FastPlans::class_of(pairs.size(), n_experts)];
  const ExpertTensors& tensors = copies[plan.copy < copies.size() ? plan.copy : 0];
  if (!plan.per_expert || plan.copy >= copies.size())
    return compute(wire::Numerics::kExact, recipe, tensors, rows, placed, out);
  if (plan.n_threads != 0) set_threads(backend_.get(), plan.n_threads);
  const Status status = compute_per_expert(plan, recipe, tensors, rows, placed, out);
  if (plan.n_threads != 0) set_threads(backend_.get(), n_threads_);
  return status;
}

void GgmlEngine::set_n_threads(int n_threads) {
  n_threads_ = n_threads;
  set_threads(backend_.get(), n_threads);
}

void GgmlEngine::forget_graphs() {
  drop_cached();
  per_expert_.clear();
}

void GgmlEngine::drop_cached() {
  by_key_.clear();
  cached_.clear();
}

// Runs the pairs order[begin, end), or pairs[begin, end) if `order` is empty.
Status GgmlEngine::call(const wire::Recipe& recipe, const ExpertTensors& tensors, RowsView rows, PlacedPairs placed,
                        std::span<const std::uint32_t> order, std::uint32_t begin, std::uint32_t end, float* out) {
  const std::span<const LocalPair> pairs = placed.pairs;
  const std::uint32_t n = end - begin;
  const std::size_t row_bytes = std::size_t{recipe.n_embd} * sizeof(float);
  const auto index = [&](std::uint32_t i) { return order.empty() ? begin + i : order[begin + i]; };

  const GraphKey key{recipe, tensors, n};
  FfnGraph once;
  FfnGraph* g = nullptr;
  if (n <= kCachedPairsMax) {
    KVASIR_ASSIGN(g, cached_graph(key));
  } else {
    KVASIR_ASSIGN(once, make_graph(key));
    g = &once;
  }

  // ggml reuses an input's memory after its last use: both are written before every run.
  const bool host = ggml_backend_buffer_is_host(g->x->buffer);
  float* x = static_cast<float*>(host ? g->x->data : staged(n * row_bytes));
  auto* ids = host ? static_cast<std::int32_t*>(g->ids->data) : staged_ids(n);
  for (std::uint32_t i = 0; i < n; ++i) {
    const LocalPair& pair = pairs[index(i)];
    std::memcpy(x + std::size_t{i} * recipe.n_embd, rows.data + pair.row * rows.row_stride, row_bytes);
    ids[i] = static_cast<std::int32_t>(pair.expert);
  }
  if (!host) {
    ggml_backend_tensor_set(g->x, x, 0, n * row_bytes);
    ggml_backend_tensor_set(g->ids, ids, 0, n * sizeof(std::int32_t));
  }

  const ggml_status status = ggml_backend_graph_compute(backend_.get(), g->graph);
  if (status != GGML_STATUS_SUCCESS)
    return fatal(std::format("ggml failed to compute on {}: {}.", ggml_backend_dev_name(device_),
                             ggml_status_to_string(status)));

  if (order.empty() && placed.where.empty()) {
    ggml_backend_tensor_get(g->out, out + std::size_t{begin} * recipe.n_embd, 0, n * row_bytes);
    return {};
  }
  const auto* y = static_cast<const float*>(g->out->data);
  if (!host) {
    y = x;  // the staging area, free again
    ggml_backend_tensor_get(g->out, x, 0, n * row_bytes);
  }
  for (std::uint32_t i = 0; i < n; ++i)
    std::memcpy(out + placed.row_of(index(i)) * recipe.n_embd, y + std::size_t{i} * recipe.n_embd, row_bytes);
  return {};
}

// call_plan_ has the pairs sorted by expert.
Status GgmlEngine::compute_per_expert(const FastPlan& plan, const wire::Recipe& recipe, const ExpertTensors& tensors,
                                      RowsView rows, PlacedPairs placed, float* out) {
  const std::span<const LocalPair> pairs = placed.pairs;
  KVASIR_ASSIGN(PerExpertGraph * graph, per_expert_graph(recipe, tensors));
  PerExpertGraph& g = *graph;
  const std::vector<std::uint32_t>& order = call_plan_.order;
  const std::size_t row_bytes = std::size_t{recipe.n_embd} * sizeof(float);
  const std::uint32_t block_max = plan.rows_max == 0 ? g.block_rows_max() : std::min(plan.rows_max, g.block_rows_max());
  const std::size_t n = order.size();
  for (std::size_t done = 0; done < n;) {
    g.begin(tensors);
    std::size_t end = done;
    while (end < n) {
      const std::uint32_t expert = pairs[order[end]].expert;
      std::uint32_t n_rows = 1;
      while (n_rows < block_max && end + n_rows < n && pairs[order[end + n_rows]].expert == expert) ++n_rows;
      if (!g.has_room(n_rows)) break;
      g.add(expert, n_rows);
      end += n_rows;
    }
    const std::size_t count = end - done;
    const bool host = g.x() != nullptr;
    float* x = host ? g.x() : static_cast<float*>(staged(count * row_bytes));
    for (std::size_t i = 0; i < count; ++i)
      std::memcpy(x + i * recipe.n_embd, rows.data + pairs[order[done + i]].row * rows.row_stride, row_bytes);
    if (!host) g.upload(x, static_cast<std::uint32_t>(count));
    if (const ggml_status status = g.run(backend_.get()); status != GGML_STATUS_SUCCESS)
      return fatal(std::format("ggml failed to compute on {}: {}.", ggml_backend_dev_name(device_),
                               ggml_status_to_string(status)));
    if (!host) g.download(x, static_cast<std::uint32_t>(count));
    const float* y = host ? g.out() : x;
    for (std::size_t i = 0; i < count; ++i)
      std::memcpy(out + placed.row_of(order[done + i]) * recipe.n_embd, y + i * recipe.n_embd, row_bytes);
    done = end;
  }
  return {};
}

Result<PerExpertGraph*> GgmlEngine::per_expert_graph(const wire::Recipe& recipe, const ExpertTensors& tensors) {
  for (const auto& graph : per_expert_)
    if (graph->fits(recipe, tensors)) return graph.get();
  KVASIR_ASSIGN(auto made, PerExpertGraph::build(recipe, tensors, device_));
  if (per_expert_.size() >= kPerExpertGraphsMax) per_expert_.erase(per_expert_.begin());
  per_expert_.push_back(std::move(made));
  return per_expert_.back().get();
}

Result<FfnGraph*> GgmlEngine::cached_graph(const GraphKey& key) {
  if (const auto found = by_key_.find(key); found != by_key_.end()) {
    cached_.splice(cached_.begin(), cached_, found->second);
    return &found->second->second;
  }
  KVASIR_ASSIGN(FfnGraph made, make_graph(key));
  if (cached_.size() >= kCachedGraphsMax) {
    by_key_.erase(cached_.back().first);
    cached_.pop_back();
  }
  cached_.emplace_front(key, std::move(made));
  by_key_.emplace(key, cached_.begin());
  return &cached_.front().second;
}

// Builds a graph and places it in the arena, which all graphs share, one running at a time.
Result<FfnGraph> GgmlEngine::make_graph(const GraphKey& key) {
  const std::uint64_t bytes = arena_bytes_per_pair(key.recipe) * key.n_pairs;
  if (bytes > kArenaBytesMax)
    return retry_elsewhere(std::format("{} rows for one expert need more than {} MiB: send them in smaller batches.",
                                       key.n_pairs, kArenaBytesMax >> 20));
  if (bytes > arena_bytes_) {
    // Grow to the next power of two of pairs, so that a growing prompt settles quickly.
    GraphKey wide = key;
    wide.n_pairs = std::bit_ceil(key.n_pairs);
    KVASIR_ASSIGN(FfnGraph measure, FfnGraph::build(wide, device_));
    drop_cached();  // their tensors lie in the memory about to be freed
    arena_bytes_ = 0;
    if (!ggml_gallocr_reserve(arena_.get(), measure.graph)) return no_memory(bytes);
    arena_bytes_ = arena_bytes_per_pair(key.recipe) * wide.n_pairs;
  }
  KVASIR_ASSIGN(FfnGraph g, FfnGraph::build(key, device_));
  const std::size_t size_before = ggml_gallocr_get_buffer_size(arena_.get(), 0);
  const bool placed = ggml_gallocr_alloc_graph(arena_.get(), g.graph);
  if (ggml_gallocr_get_buffer_size(arena_.get(), 0) != size_before) drop_cached();  // it had to grow after all
  if (!placed) return no_memory(bytes);
  return g;
}

std::unexpected<Error> GgmlEngine::no_memory(std::uint64_t bytes) const {
  return retry_later(std::format("The device {} has no {} KiB left to compute in.", ggml_backend_dev_name(device_),
                                 (bytes >> 10) + 1));
}

void* GgmlEngine::staged(std::size_t bytes) {
  if (staging_.size() < bytes) staging_.resize(std::max(bytes, 2 * staging_.size()));
  return staging_.data();
}
std::int32_t* GgmlEngine::staged_ids(std::size_t n) {
  if (staging_ids_.size() < n) staging_ids_.resize(std::max(n, 2 * staging_ids_.size()));
  return staging_ids_.data();
}

}  // namespace kvasir::ffn
