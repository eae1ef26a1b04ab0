// What a request will take: as the tuner measured at the start, then as requests have shown. Admission,
// PONG and a node's report to its hub go by it.
//
// Thread contract: any thread; an update lost between two does no harm.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "base/clock.h"
#include "ffn/tuner.h"
#include "wire/messages.h"

namespace kvasir::worker {

class CostModel {
 public:
  // Before the first request. Zeros are not measured.
  void seed(const ffn::Speeds& exact, const ffn::Speeds& fast);
  // `n_experts` different ones. 0: nothing like it is known.
  Nanos predict(wire::Numerics numerics, std::size_t n_pairs, std::size_t n_experts) const;
  void observe(wire::Numerics numerics, std::size_t n_pairs, std::size_t n_experts, Nanos took);
  // Microseconds of a pair whose expert has one row, as in a lone decode step, in the class that was asked
  // for last: comparable between workers whatever they are asked. 0: not known yet.
  std::uint32_t pair_us() const;

 private:
  using Table = std::array<std::atomic<float>, ffn::kRowClasses>;  // ns a pair; 0: not known
  static float nearest(const Table& table, std::uint32_t row_class);
  float pair_ns(wire::Numerics numerics, std::uint32_t row_class) const;
  Table& table(wire::Numerics numerics) { return tables_[static_cast<std::size_t>(numerics)]; }
  const Table& table(wire::Numerics numerics) const { return tables_[static_cast<std::size_t>(numerics)]; }

  std::array<Table, 3> tables_{};
  std::atomic<wire::Numerics> last_ = wire::Numerics::kExact;
};

}  // namespace kvasir::worker
