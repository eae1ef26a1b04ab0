// Whether a small round goes to one worker as a whole or is spread over several, by what rounds took.
//
// Workers on machines of their own answer halves sooner than a whole; workers that share a machine, or lie
// behind a long way, do not: there a second request costs bytes, wake-ups and another chance to be late. Which
// of it holds, only whole rounds tell: a worker's own times look the same in both.
#pragma once

#include <array>
#include <cstdint>

#include "base/clock.h"

namespace kvasir::dispatch {

enum class FanOutWay : std::uint8_t { kSpread, kGather };

class FanOut {
 public:
  static constexpr std::uint32_t kPairsMax = 64;    // larger rounds are always spread
  static constexpr std::uint32_t kTrials = 16;      // rounds of either way before one is preferred
  static constexpr std::uint32_t kRetryEvery = 64;  // of so many rounds one goes the other way, so that a verdict can change

  // For a round of so many pairs, at most kPairsMax, that one worker could answer alone.
  FanOutWay choose(std::uint32_t pairs);
  // A round that went that way, undisturbed, took so long from its placing to its last answer.
  void observe(FanOutWay way, std::uint32_t pairs, Nanos took);

 private:
  struct Mean {
    double ns = 0;
    std::uint32_t count = 0;
  };
  struct Size {
    std::array<Mean, 2> means{};  // by FanOutWay
    std::uint32_t rounds = 0;
  };
  Size& size_of(std::uint32_t pairs);

  std::array<Size, 7> sizes_{};  // by the power of two
};

}  // namespace kvasir::dispatch
