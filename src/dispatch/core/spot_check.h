// Spot checks: an expert's rows of one round, computed a second time. A check belongs to the
// round it was drawn in, so that what it finds wrong never leaves the round.
#pragma once

#include <array>
#include <cstdint>
#include <limits>

#include "dispatch/core/routes.h"

namespace kvasir::dispatch {

// In place of a worker: computed here. Its word is final.
inline constexpr WorkerIndex kComputedHere = std::numeric_limits<WorkerIndex>::max();

// A second (or third) answer to all rows of an expert. Row i of the expert lies in slot
// first_slot + i, in a buffer of the driver's.
struct Opinion {
  enum class State : std::uint8_t { kPending, kGiven, kFailed };
  WorkerIndex from = 0;
  std::uint32_t first_slot = 0;
  State state = State::kPending;
};

struct SpotCheck {
  std::uint32_t group = 0;  // the engine's: one expert of the round
  bool open = true;
  bool asking = true;       // an opinion has to be asked for
  bool sample = false;      // drawn for a share of the answers: the round is not held up for it
  std::uint8_t n_opinions = 0;
  std::array<Opinion, 2> opinions{};  // the second of them only where the first disagrees
};

// What a check has shown, for the log.
struct Evidence {
  WorkerIndex worker = 0;
  std::uint32_t pair = 0;   // of the round
  std::uint32_t slot = 0;   // where the right row lies
  WorkerIndex judge = 0;    // kComputedHere, or the worker that was believed
};

// The rows, as the engine's caller keeps them.
class CheckedRows {
 public:
  virtual ~CheckedRows() = default;
  // Equal as the numeric class demands: every bit, or within its tolerance.
  virtual bool answer_agrees(std::uint32_t pair, std::uint32_t slot) const = 0;
  virtual bool slots_agree(std::uint32_t a, std::uint32_t b) const = 0;
  // Called before the wrong answer is replaced.
  virtual void lie_found(const Evidence& evidence) = 0;
  virtual void replace_answer(std::uint32_t pair, std::uint32_t slot) = 0;
};

}  // namespace kvasir::dispatch
