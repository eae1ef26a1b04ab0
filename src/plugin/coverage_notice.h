// Says so, once each way, when experts' work begins to be done by the backbone for lack of workers,
// and when workers do all of it again. Pure: fed with counters, gives a sentence.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace kvasir::plugin {

class CoverageNotice {
 public:
  // The counters since the start of the process; a sentence when the state has changed.
  std::optional<std::string> look(std::uint64_t pairs_remote, std::uint64_t pairs_local);

  // Fewer uses of experts than these say nothing: some tokens use only what is held.
  static constexpr std::uint64_t kPairsMin = 512;
  // A hedge that came too late, or one worker's restart, is no news.
  static constexpr double kPartialShare = 0.05;
  static constexpr double kWholeShare = 0.005;

 private:
  std::uint64_t remote_ = 0, local_ = 0;  // at the last judgement
  bool partial_ = false;
};

}  // namespace kvasir::plugin
