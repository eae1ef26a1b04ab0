#include "ffn/lane_engine.h"

#include <algorithm>
#include <functional>

#include "base/check.h"
#include "ffn/device.h"

namespace kvasir::ffn {
namespace {

// A piece of work that reads less than this is over before another thread has woken.
constexpr std::uint64_t kWorthWakingBytes = 256u << 10;
// With so many experts a thread, it hardly matters who gets the last one.
constexpr std::uint32_t kEvenEnough = 4;
constexpr std::uint64_t kLaneArenaBytesMin = 1u << 20;

std::uint64_t expert_bytes(const ExpertTensors& t) {
  std::uint64_t bytes = 0;
  for (const ggml_tensor* matrix : {t.gate, t.up, t.gate_up, t.down})
    if (matrix) bytes += ggml_nbytes(matrix) / std::max(t.n_local, 1u);
  return bytes;
}

}  // namespace

Result<std::unique_ptr<Engine>> LaneEngine::create(ggml_backend_dev_t device, wire::Numerics numerics, int n_threads) {
  std::unique_ptr<LaneEngine> made(new LaneEngine(device, numerics, n_threads));
  KVASIR_ASSIGN(ggml_backend_ptr backend, open_backend(device, n_threads));
  made->whole_ = std::make_unique<GgmlEngine>(device, std::move(backend), numerics, n_threads);
  return made;
}

Status LaneEngine::grow(std::uint32_t n_lanes) {
  while (lanes_.size() < n_lanes) {
    KVASIR_ASSIGN(ggml_backend_ptr backend, open_backend(device_, 1));
    const std::uint64_t arena = std::max(kArenaBytesTarget / n_lanes, kLaneArenaBytesMin);
    lanes_.push_back({std::make_unique<GgmlEngine>(device_, std::move(backend), numerics_, 1, arena), {}, {}});
    lanes_.back().engine->set_fast_plans(engine_plans_);
  }
  if (!crew_ || crew_->n_helpers() + 1 < n_lanes) crew_ = std::make_unique<Crew>(n_lanes - 1);
  return {};
}

void LaneEngine::group_by_expert(std::span<const LocalPair> pairs, std::uint32_t n_local) {
  call_plan_.by_expert(pairs, n_local);
  const std::vector<std::uint32_t>& order = call_plan_.order;
  groups_.clear();
  for (std::uint32_t i = 0; i < order.size(); ++i) {
    if (i == 0 || pairs[order[i]].expert != pairs[order[i - 1]].expert) groups_.push_back({i, i});
    groups_.back().end = i + 1;
  }
  // The large ones first: the small ones then even the threads out.
  std::ranges::sort(groups_, std::ranges::greater{}, [](const Group& g) { return std::pair(g.size(), ~g.begin); });
}

PlacedPairs LaneEngine::gather(std::span<const LocalPair> pairs, std::span<const Group> groups,
                               std::vector<LocalPair>& into, std::vector<std::uint32_t>& where) const {
  into.clear();
  where.clear();
  for (const Group& group : groups)
    for (std::uint32_t i = group.begin; i < group.end; ++i) {
      where.push_back(call_plan_.order[i]);
      into.push_back(pairs[where.back()]);
    }
  return {into, where};
}

template <typename Compute>
Status LaneEngine::share(std::span<const LocalPair> pairs, const ExpertTensors& tensors, std::uint32_t n_threads,
                         const Compute& compute) {
  const auto n_groups = static_cast<std::uint32_t>(groups_.size());
  const bool wake = n_threads > 1 && expert_bytes(tensors) * pairs.size() >= kWorthWakingBytes;
  if (!wake) {
    KVASIR_TRY(grow(1));
    return compute(*lanes_[0].engine, PlacedPairs{pairs, {}});
  }
  const std::uint32_t rest = n_groups < kEvenEnough * n_threads ? n_groups % n_threads : 0;
  const std::uint32_t n_shared = n_groups - rest;
  if (n_shared > 0) {
    KVASIR_TRY(grow(n_threads));
    for (Lane& lane : lanes_) lane.status = {};
    std::atomic<std::uint32_t> next = 0;
    crew_->run(n_threads - 1, [&](std::uint32_t l) {
      Lane& lane = lanes_[l];
      for (std::uint32_t g; lane.status && (g = next.fetch_add(1, std::memory_order_relaxed)) < n_shared;) {
        const Group& group = groups_[g];
        const std::span<const std::uint32_t> where(call_plan_.order.data() + group.begin, group.size());
        lane.pairs.clear();
        for (const std::uint32_t i : where) lane.pairs.push_back(pairs[i]);
        lane.status = compute(*lane.engine, PlacedPairs{lane.pairs, where});
      }
    });
    for (const Lane& lane : lanes_) KVASIR_TRY(lane.status);
  }
  if (rest == 0) return {};
  whole_->set_n_threads(static_cast<int>(n_threads));
  return compute(*whole_, gather(pairs, std::span(groups_).last(rest), rest_pairs_, rest_where_));
}

Status LaneEngine::compute(const wire::Recipe& recipe, const ExpertTensors& tensors, RowsView rows,
                           std::span<const LocalPair> pairs, float* out) {
  return compute(numerics_, recipe, tensors, rows, pairs, out);
}

Status LaneEngine::compute(wire::Numerics numerics, const wire::Recipe& recipe, const ExpertTensors& tensors,
                           RowsView rows, std::span<const LocalPair> pairs, float* out) {
  if (pairs.empty()) return {};
  for (const LocalPair& pair : pairs) KVASIR_CHECK(pair.expert < tensors.n_local);
  group_by_expert(pairs, tensors.n_local);
  return share(pairs, tensors, static_cast<std::uint32_t>(n_threads_), [&](GgmlEngine& engine, PlacedPairs placed) {
    return engine.compute(numerics, recipe, tensors, rows, placed, out);
  });
}

Status LaneEngine::compute_fast(const wire::Recipe& recipe, std::span<const ExpertTensors> copies, RowsView rows,
                                std::span<const LocalPair> pairs, float* out) {
  if (pairs.empty()) return {};
  KVASIR_CHECK(!copies.empty());
  for (const LocalPair& pair : pairs) KVASIR_CHECK(pair.expert < copies[0].n_local);
  group_by_expert(pairs, copies[0].n_local);
  const int asked = fast_plans_[FastPlans::class_of(pairs.size(), groups_.size())].n_threads;
  return share(pairs, copies[0], static_cast<std::uint32_t>(asked != 0 ? asked : n_threads_),
               [&](GgmlEngine& engine, PlacedPairs placed) { return engine.compute_fast(recipe, copies, rows, placed, out); });
}

void LaneEngine::set_fast_plans(const FastPlans& plans) {
  fast_plans_ = engine_plans_ = plans;
  for (std::uint32_t c = 0; c < kRowClasses; ++c) engine_plans_[c].n_threads = 0;
  whole_->set_fast_plans(engine_plans_);
  for (Lane& lane : lanes_) lane.engine->set_fast_plans(engine_plans_);
}

void LaneEngine::set_n_threads(int n_threads) { n_threads_ = std::clamp(n_threads, 1, kThreadsMax); }

void LaneEngine::forget_graphs() {
  whole_->forget_graphs();
  for (Lane& lane : lanes_) lane.engine->forget_graphs();
}

}  // namespace kvasir::ffn
