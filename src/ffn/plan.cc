#include "ffn/plan.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace kvasir::ffn {

void CallPlan::count_rows(std::span<const LocalPair> pairs, std::uint32_t n_local) {
  rows_.assign(n_local, 0);
  for (const LocalPair& pair : pairs) ++rows_[pair.expert];
}

// order := the pairs sorted by `bucket_of`, stable. `sizes` are the buckets' sizes.
template <typename BucketOf>
void CallPlan::sort_into_buckets(std::size_t n, std::span<const std::uint32_t> sizes, BucketOf bucket_of) {
  next_.resize(sizes.size());
  std::exclusive_scan(sizes.begin(), sizes.end(), next_.begin(), 0u);
  order.resize(n);
  for (std::uint32_t i = 0; i < n; ++i) order[next_[bucket_of(i)]++] = i;
}

void CallPlan::by_expert(std::span<const LocalPair> pairs, std::uint32_t n_local) {
  count_rows(pairs, n_local);
  sort_into_buckets(pairs.size(), rows_, [&](std::uint32_t i) { return pairs[i].expert; });
  ends.assign(1, static_cast<std::uint32_t>(pairs.size()));
}

void CallPlan::whole_experts(std::span<const LocalPair> pairs, std::uint32_t n_local, std::uint32_t pairs_max) {
  KVASIR_CHECK(pairs_max > 0);
  const auto n = static_cast<std::uint32_t>(pairs.size());
  order.clear();
  ends.clear();
  if (n <= pairs_max) return ends.push_back(n);
  by_expert(pairs, n_local);
  ends.clear();
  std::uint32_t begin = 0, end = 0;
  for (std::uint32_t expert_rows : rows_) {
    if (end > begin && end - begin + expert_rows > pairs_max) {
      ends.push_back(end);
      begin = end;
    }
    end += expert_rows;
  }
  ends.push_back(end);
}

void CallPlan::invariant(std::span<const LocalPair> pairs, std::uint32_t n_local, std::uint32_t rows_per_expert_max,
                         std::uint32_t pairs_max) {
  KVASIR_CHECK(pairs_max > 0 && rows_per_expert_max > 0);
  const auto n = static_cast<std::uint32_t>(pairs.size());
  count_rows(pairs, n_local);
  const std::uint32_t most = rows_.empty() ? 0 : *std::ranges::max_element(rows_);
  order.clear();
  ends.clear();
  if (n <= pairs_max && most <= rows_per_expert_max) return ends.push_back(n);

  // Pass p takes the p-th chunk of every expert.
  seen_.assign(n_local, 0);
  pass_of_.resize(n);
  pass_sizes_.assign((most + rows_per_expert_max - 1) / rows_per_expert_max, 0);
  for (std::uint32_t i = 0; i < n; ++i) {
    pass_of_[i] = seen_[pairs[i].expert]++ / rows_per_expert_max;
    ++pass_sizes_[pass_of_[i]];
  }
  sort_into_buckets(n, pass_sizes_, [&](std::uint32_t i) { return pass_of_[i]; });
  std::uint32_t begin = 0;
  for (std::uint32_t size : pass_sizes_) {
    const std::uint32_t end = begin + size;
    while (end - begin > pairs_max) ends.push_back(begin += pairs_max);
    ends.push_back(begin = end);
  }
}

}  // namespace kvasir::ffn
