#include "dispatch/core/fan_out.h"

#include <algorithm>
#include <bit>

#include "base/check.h"

namespace kvasir::dispatch {
namespace {

constexpr std::uint32_t kMeanOver = 16;  // rounds an established mean remembers
constexpr double kRatioMax = 4;          // one stall must not decide

}  // namespace

FanOut::Size& FanOut::size_of(std::uint32_t pairs) {
  static_assert(std::bit_width(kPairsMax) == std::tuple_size_v<decltype(sizes_)>);
  KVASIR_CHECK(pairs > 0 && pairs <= kPairsMax);
  return sizes_[std::bit_width(pairs) - 1u];
}

FanOutWay FanOut::choose(std::uint32_t pairs) {
  Size& size = size_of(pairs);
  const Mean& spread = size.means[static_cast<std::size_t>(FanOutWay::kSpread)];
  const Mean& gather = size.means[static_cast<std::size_t>(FanOutWay::kGather)];
  ++size.rounds;
  // In turn, so that both meet the same load.
  if (spread.count < kTrials || gather.count < kTrials) return size.rounds % 2 == 0 ? FanOutWay::kGather : FanOutWay::kSpread;
  const bool gathered = (gather.ns <= spread.ns) != (size.rounds % kRetryEvery == 0);
  return gathered ? FanOutWay::kGather : FanOutWay::kSpread;
}

void FanOut::observe(FanOutWay way, std::uint32_t pairs, Nanos took) {
  Mean& mean = size_of(pairs).means[static_cast<std::size_t>(way)];
  double sample = static_cast<double>(took.count());
  if (mean.count > 0) sample = std::min(sample, kRatioMax * mean.ns);
  mean.count = std::min(mean.count + 1, kMeanOver);
  mean.ns += (sample - mean.ns) / mean.count;
}

}  // namespace kvasir::dispatch
