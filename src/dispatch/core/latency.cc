#include "dispatch/core/latency.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvasir::dispatch {
namespace {

constexpr double kSmoothing = 1.0 / 8;  // weight of a new answer once 8 are in
// One answer moves a mean by at most this factor's share, so that a single stall does not
// loosen the deadlines after it; a worker that is really slower is believed after a few.
constexpr double kOutlierFactor = 4;
// The ratio histogram forgets by halving: the last few hundred answers count.
constexpr float kRatioWindow = 512;

Nanos to_nanos(double ns) { return Nanos(static_cast<std::int64_t>(std::min(ns, 9e18))); }

}  // namespace

void LatencyModel::set_prior(Nanos fixed, Nanos per_pair) {
  prior_fixed_ns_ = std::max(1.0, static_cast<double>(fixed.count()));
  prior_pair_ns_ = std::max(0.0, static_cast<double>(per_pair.count()));
}

LatencyModel::Prediction LatencyModel::predict(std::uint32_t pairs) const {
  const double x = pairs;
  const Bucket* lower = nullptr;   // largest measured size <= x
  const Bucket* second = nullptr;  // the next smaller one
  const Bucket* upper = nullptr;   // smallest measured size > x
  for (const Bucket& bucket : buckets_) {
    if (bucket.count == 0) continue;
    if (bucket.pairs <= x) {
      second = lower;
      lower = &bucket;
    } else {
      upper = &bucket;
      break;
    }
  }
  if (lower && upper) {
    const double t = (x - lower->pairs) / (upper->pairs - lower->pairs);
    return {to_nanos(lower->ns + t * (upper->ns - lower->ns)), true};
  }
  if (upper) return {to_nanos(upper->ns), true};  // fewer pairs do not take longer
  if (lower) {
    double slope = lower->ns / lower->pairs;
    if (second && lower->pairs > second->pairs)
      slope = std::clamp((lower->ns - second->ns) / (lower->pairs - second->pairs), 0.0, slope);
    return {to_nanos(lower->ns + slope * (x - lower->pairs)), x < 2 * lower->pairs + 2};
  }
  return {to_nanos(prior_fixed_ns_ + prior_pair_ns_ * x), false};
}

std::size_t LatencyModel::bucket_of(std::uint32_t pairs) {
  return std::min<std::size_t>(std::bit_width(std::max(pairs, 1u)) - 1u, kBuckets - 1);
}

Nanos LatencyModel::at_least(std::uint32_t pairs) const {
  std::size_t b = bucket_of(pairs);
  if (buckets_[b].count > 0) return predict(pairs).expected;
  while (b > 0)
    if (buckets_[--b].count > 0) return to_nanos(buckets_[b].ns);
  return predict(pairs).expected;
}

// What requests of a bucket take at most where one of `pairs` takes `ns`: fewer pairs no longer, more of them no
// longer than in proportion.
double LatencyModel::longest(const Bucket& bucket, double pairs, double ns) { return ns * std::max(1.0, bucket.pairs / pairs); }

void LatencyModel::observe(std::uint32_t pairs, Nanos latency) {
  const double ns = std::max(1.0, static_cast<double>(latency.count()));
  const Prediction before = predict(pairs);
  if (before.measured) {
    const double ratio = ns / std::max(1.0, static_cast<double>(before.expected.count()));
    const int step = static_cast<int>(std::ceil(std::log2(ratio) * kRatioSteps)) - kRatioLow;
    ratios_[static_cast<std::size_t>(std::clamp(step, 0, static_cast<int>(kRatios) - 1))] += 1;
    ratios_sum_ += 1;
    if (ratios_sum_ > kRatioWindow) {
      ratios_sum_ = 0;
      for (float& count : ratios_) ratios_sum_ += (count /= 2);
    }
  }
  Bucket& bucket = buckets_[bucket_of(pairs)];
  if (bucket.count == 0) {
    bucket = {static_cast<double>(pairs), ns, 1};
  } else {
    bucket.count = std::min(bucket.count + 1, 8u);
    const double weight = std::max(kSmoothing, 1.0 / bucket.count);
    bucket.pairs += weight * (pairs - bucket.pairs);
    bucket.ns += weight * (std::min(ns, kOutlierFactor * bucket.ns) - bucket.ns);
  }
  // What is known of other sizes may be old, and a worker that it makes seem slow is not asked for them again.
  for (Bucket& other : buckets_) {
    if (other.count == 0) continue;
    const double at_most = longest(other, bucket.pairs, bucket.ns);
    if (other.ns > at_most) other.ns += kSmoothing * (at_most - other.ns);
  }
  ++samples_;
}

bool LatencyModel::improve(std::uint32_t pairs, Nanos latency) {
  constexpr double kMuch = 0.8;
  bool much = false;
  for (Bucket& bucket : buckets_) {
    if (bucket.count == 0) continue;
    const double at_most = longest(bucket, std::max(pairs, 1u), std::max(1.0, static_cast<double>(latency.count())));
    if (at_most >= bucket.ns) continue;
    much |= at_most <= kMuch * bucket.ns;
    bucket.ns = std::sqrt(bucket.ns * at_most);
  }
  return much;
}

double LatencyModel::ratio_quantile(double quantile) const {
  if (ratios_sum_ < kRatioSamplesMin) return kRatioUnknown;
  const double above = (1 - quantile) * ratios_sum_;
  double sum = 0;
  for (std::size_t i = kRatios; i-- > 0;) {
    sum += ratios_[i];
    // Buckets hold ratios up to their own value, so its value is an upper estimate.
    if (sum > above) return std::exp2(static_cast<double>(static_cast<int>(i) + kRatioLow) / kRatioSteps);
  }
  return kRatioUnknown;
}

}  // namespace kvasir::dispatch
