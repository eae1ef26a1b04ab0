// KVASIR_WIRE=auto: f32 or f16, for each worker and for small and large rounds on its own.
//
// f16 has to pass a gate first, layer by layer: on the model's own rows, sent and received,
// the rounding alone must keep 1 - cosine below kLossMax. It then has to pay: small trials
// measure the time of a request in both types, against what was expected of it. Halving the
// bytes saves half of what they cost, so they cost twice the difference.
//
// One driver's, on its thread.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "dispatch/core/routes.h"
#include "wire/messages.h"

namespace kvasir::dispatch {

class WireChoice {
 public:
  static constexpr double kLossMax = 1e-6;
  static constexpr std::uint32_t kGateRows = 16;      // of each direction
  static constexpr double kByteShare = 0.05;          // bytes that cost less than this travel as they are
  static constexpr std::uint32_t kTrials = 32;        // requests in each type before a verdict
  static constexpr std::uint32_t kRetryEvery = 64;    // then one request in so many is of the other type
  static constexpr std::uint32_t kLargeRows = 16;     // rounds with more rows are prompts

  enum class Direction : std::uint8_t { kSent, kReceived };
  // Whether rows of this layer still have to be shown to the gate.
  bool gate_wants(std::uint32_t layer, Direction direction) const;
  // 1 - cosine of a row with what f16 makes of it.
  void show(std::uint32_t layer, Direction direction, double loss);
  bool gate_passed(std::uint32_t layer) const;

  // For the next round, by worker. Stands until the next call.
  std::span<const wire::RowType> types(std::size_t n_workers, std::uint32_t layer, std::uint32_t n_rows);
  // A request of that round took `ratio` times what was expected.
  void observe(WorkerIndex w, wire::RowType type, std::uint32_t n_rows, double ratio);
  void forget(WorkerIndex w);  // its slot has another owner, or another way there

 private:
  struct Gate {
    std::array<std::uint32_t, 2> shown{};
    bool barred = false;
  };
  struct Mean {
    double value = 0;
    std::uint32_t count = 0;
    void add(double sample);
  };
  struct Link {
    Mean f32, f16;
    std::uint32_t asked = 0;
  };
  static wire::RowType next_type(Link& link);
  Gate& gate(std::uint32_t layer);
  Link& link(WorkerIndex w, std::uint32_t n_rows);

  std::vector<Gate> gates_;                  // by layer's recipe id
  std::vector<std::array<Link, 2>> links_;   // by worker; small rounds, large rounds
  std::vector<wire::RowType> types_;
};

// 1 - cosine of `row` with its f16 form; 1 where that overflows.
double f16_loss(std::span<const float> row);

}  // namespace kvasir::dispatch
