// What a worker's answers have cost so far: expected time by size of request, and the
// distribution of (measured / expected) that deadlines are taken from.
#pragma once

#include <array>
#include <cstdint>

#include "base/clock.h"

namespace kvasir::dispatch {

class LatencyModel {
 public:
  struct Prediction {
    Nanos expected{};
    bool measured = false;  // false: guessed, or far above every size seen
  };

  // One answer to a request of `pairs` (> 0) pairs.
  void observe(std::uint32_t pairs, Nanos latency);
  // One answer to a request of `pairs` pairs took `latency` at most, and what was measured is old.
  // Fewer pairs do not take longer, and more of them no longer than in proportion: each size that was
  // expected above that moves half way there (of the ratio). True if one was by a quarter at least.
  bool improve(std::uint32_t pairs, Nanos latency);
  // Used until something is measured.
  void set_prior(Nanos fixed, Nanos per_pair);
  Prediction predict(std::uint32_t pairs) const;
  // What is expected, at least: of a size that no answer had yet, what the next smaller one takes.
  Nanos at_least(std::uint32_t pairs) const;
  // Upper estimate of that quantile of latency / expected; kRatioUnknown before kRatioSamplesMin.
  double ratio_quantile(double quantile) const;
  std::uint64_t samples() const { return samples_; }

  static constexpr double kRatioUnknown = 4.0;
  static constexpr std::uint32_t kRatioSamplesMin = 16;

 private:
  // One bucket per power of two, because time per pair falls as more rows share a matrix
  // and a single line through small decode rounds predicts long prompts badly.
  struct Bucket {
    double pairs = 0;  // running mean of the sizes seen
    double ns = 0;     // running mean of their latency
    std::uint32_t count = 0;
  };
  static constexpr std::size_t kBuckets = 24;
  static std::size_t bucket_of(std::uint32_t pairs);
  static double longest(const Bucket& bucket, double pairs, double ns);
  // Ratios from 2^-4 to 2^6 in steps of 2^(1/4).
  static constexpr int kRatioSteps = 4;
  static constexpr int kRatioLow = -4 * kRatioSteps;
  static constexpr std::size_t kRatios = 10 * kRatioSteps + 1;

  std::array<Bucket, kBuckets> buckets_{};
  std::array<float, kRatios> ratios_{};
  float ratios_sum_ = 0;
  double prior_fixed_ns_ = 1e6;
  double prior_pair_ns_ = 1e6;
  std::uint64_t samples_ = 0;
};

}  // namespace kvasir::dispatch
