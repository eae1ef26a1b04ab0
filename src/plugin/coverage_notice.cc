#include "plugin/coverage_notice.h"

#include <format>

namespace kvasir::plugin {

std::optional<std::string> CoverageNotice::look(std::uint64_t pairs_remote, std::uint64_t pairs_local) {
  const std::uint64_t remote = pairs_remote - remote_, local = pairs_local - local_;
  if (remote + local < kPairsMin) return std::nullopt;
  remote_ = pairs_remote;
  local_ = pairs_local;
  const double share = static_cast<double>(local) / static_cast<double>(remote + local);
  if (!partial_ && share > kPartialShare) {
    partial_ = true;
    return std::format("{:.0f} % of the experts' work is done on this machine, because no worker answers for them: the text is the "
                       "same, but slower; kvasir doctor says who is missing.",
                       share * 100);
  }
  if (partial_ && share < kWholeShare) {
    partial_ = false;
    return "workers do the experts' work again.";
  }
  return std::nullopt;
}

}  // namespace kvasir::plugin
