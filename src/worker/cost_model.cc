#include "worker/cost_model.h"

#include <algorithm>

#include "ffn/fast_plan.h"

namespace kvasir::worker {
namespace {

using wire::Numerics;

constexpr float kNewWeight = 0.125f;  // an average over about eight requests of a class

}  // namespace

void CostModel::seed(const ffn::Speeds& exact, const ffn::Speeds& fast) {
  const auto fill = [](Table& table, const ffn::Speeds& speeds) {
    for (std::uint32_t c = 0; c < ffn::kRowClasses; ++c)
      table[c] = speeds[c] > 0 ? static_cast<float>(1e9 / speeds[c]) : 0.f;
  };
  fill(table(Numerics::kExact), exact);
  fill(table(Numerics::kFast), fast);
  last_ = nearest(table(Numerics::kExact), 0) > 0 ? Numerics::kExact : Numerics::kFast;
}

// Of the class itself, or of the one with the next more rows, or fewer.
float CostModel::nearest(const Table& table, std::uint32_t row_class) {
  for (std::uint32_t c = row_class; c < ffn::kRowClasses; ++c)
    if (const float ns = table[c].load(std::memory_order_relaxed); ns > 0) return ns;
  for (std::uint32_t c = row_class; c-- > 0;)
    if (const float ns = table[c].load(std::memory_order_relaxed); ns > 0) return ns;
  return 0;
}

float CostModel::pair_ns(Numerics numerics, std::uint32_t row_class) const {
  for (const Numerics like : {numerics, Numerics::kExact, Numerics::kFast, Numerics::kInvariant})
    if (const float ns = nearest(table(like), row_class); ns > 0) return ns;
  return 0;
}

Nanos CostModel::predict(Numerics numerics, std::size_t n_pairs, std::size_t n_experts) const {
  const float ns = pair_ns(numerics, ffn::FastPlans::class_of(n_pairs, std::max<std::size_t>(n_experts, 1)));
  return Nanos(static_cast<std::int64_t>(static_cast<double>(ns) * static_cast<double>(n_pairs)));
}

void CostModel::observe(Numerics numerics, std::size_t n_pairs, std::size_t n_experts, Nanos took) {
  if (n_pairs == 0) return;
  const auto ns = std::max(1.f, static_cast<float>(took.count()) / static_cast<float>(n_pairs));
  std::atomic<float>& known = table(numerics)[ffn::FastPlans::class_of(n_pairs, std::max<std::size_t>(n_experts, 1))];
  const float old = known.load(std::memory_order_relaxed);
  known.store(old > 0 ? old + (ns - old) * kNewWeight : ns, std::memory_order_relaxed);
  last_.store(numerics, std::memory_order_relaxed);
}

std::uint32_t CostModel::pair_us() const {
  const float ns = pair_ns(last_.load(std::memory_order_relaxed), 0);
  return ns > 0 ? static_cast<std::uint32_t>(std::clamp(ns / 1000.f, 1.f, 1e9f)) : 0;
}

}  // namespace kvasir::worker
