#include "dispatch/core/reputation.h"

#include <algorithm>

namespace kvasir::dispatch {

double check_share(const Reputation& reputation, const Tuning& tuning) {
  const std::uint64_t new_until = tuning.spot_new_pairs << std::min(reputation.offences, tuning.spot_new_doublings_max);
  const double factor = reputation.asked_in_standing < new_until ? tuning.spot_new_factor : 1.0;
  return std::min(1.0, tuning.spot_check * factor);
}

Nanos lie_quarantine(const Reputation& reputation, const Tuning& tuning) {
  Nanos length = tuning.lie_quarantine_first;
  for (std::uint32_t i = 1; i < reputation.offences && length < tuning.lie_quarantine_max; ++i) length *= 2;
  return std::min(length, tuning.lie_quarantine_max);
}

}  // namespace kvasir::dispatch
