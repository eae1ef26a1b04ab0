#include "ffn/plan.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace kvasir::ffn {
namespace {

std::vector<std::uint32_t> count_rows(std::span<const LocalPair> pairs, std::uint32_t n_local) {
  std::vector<std::uint32_t> rows(n_local, 0);
  for (const LocalPair& pair : pairs) ++rows[pair.expert];
  return rows;
}

// order := the pairs sorted by `bucket_of`, stable. `sizes` are the buckets' sizes.
template <typename BucketOf>
std::vector<std::uint32_t> sort_into_buckets(std::size_t n, const std::vector<std::uint32_t>& sizes,
                                             BucketOf bucket_of) {
  std::vector<std::uint32_t> next(sizes.size(), 0);
  std::exclusive_scan(sizes.begin(), sizes.end(), next.begin(), 0u);
  std::vector<std::uint32_t> order(n);
  for (std::uint32_t i = 0; i < n; ++i) order[next[bucket_of(i)]++] = i;
  return order;
}

}  // namespace

CallPlan plan_whole_experts(std::span<const LocalPair> pairs, std::uint32_t n_local, std::uint32_t pairs_max) {
  KVASIR_CHECK(pairs_max > 0);
  const auto n = static_cast<std::uint32_t>(pairs.size());
  if (n <= pairs_max) return {{}, {n}};
  const std::vector<std::uint32_t> rows = count_rows(pairs, n_local);
  CallPlan plan;
  plan.order = sort_into_buckets(n, rows, [&](std::uint32_t i) { return pairs[i].expert; });
  std::uint32_t begin = 0, end = 0;
  for (std::uint32_t expert_rows : rows) {
    if (end > begin && end - begin + expert_rows > pairs_max) {
      plan.ends.push_back(end);
      begin = end;
    }
    end += expert_rows;
  }
  plan.ends.push_back(end);
  return plan;
}

CallPlan plan_invariant(std::span<const LocalPair> pairs, std::uint32_t n_local, std::uint32_t rows_per_expert_max,
                        std::uint32_t pairs_max) {
  KVASIR_CHECK(pairs_max > 0 && rows_per_expert_max > 0);
  const auto n = static_cast<std::uint32_t>(pairs.size());
  const std::vector<std::uint32_t> rows = count_rows(pairs, n_local);
  const std::uint32_t most = rows.empty() ? 0 : *std::ranges::max_element(rows);
  if (n <= pairs_max && most <= rows_per_expert_max) return {{}, {n}};

  // Pass p takes the p-th chunk of every expert.
  std::vector<std::uint32_t> seen(n_local, 0), pass_of(n);
  std::vector<std::uint32_t> pass_sizes((most + rows_per_expert_max - 1) / rows_per_expert_max, 0);
  for (std::uint32_t i = 0; i < n; ++i) {
    pass_of[i] = seen[pairs[i].expert]++ / rows_per_expert_max;
    ++pass_sizes[pass_of[i]];
  }
  CallPlan plan;
  plan.order = sort_into_buckets(n, pass_sizes, [&](std::uint32_t i) { return pass_of[i]; });
  std::uint32_t begin = 0;
  for (std::uint32_t size : pass_sizes) {
    const std::uint32_t end = begin + size;
    while (end - begin > pairs_max) plan.ends.push_back(begin += pairs_max);
    plan.ends.push_back(begin = end);
  }
  return plan;
}

}  // namespace kvasir::ffn
