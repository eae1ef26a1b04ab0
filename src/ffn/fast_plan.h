// How a request of class fast is computed, by how many rows its experts have. Exact requests
// have one plan only and none of this matters to them.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace kvasir::ffn {

struct FastPlan {
  std::uint32_t copy = 0;        // of the weights, as handed to Engine::compute_fast
  bool per_expert = false;       // one product per expert (MUL_MAT), not one over all (MUL_MAT_ID)
  std::uint32_t rows_max = 0;    // of an expert in one product (per_expert only); 0: as they come
  int n_threads = 0;             // 0: the engine's
  friend bool operator==(const FastPlan&, const FastPlan&) = default;
};

inline constexpr std::uint32_t kRowClasses = 8;  // mean rows per expert: 1, 2, 4, … 128 and more

class FastPlans {
 public:
  static std::uint32_t class_of(std::size_t n_pairs, std::size_t n_experts) {
    std::uint32_t c = 0;
    while (c + 1 < kRowClasses && n_experts << (c + 1) <= n_pairs) ++c;
    return c;
  }
  FastPlan& operator[](std::uint32_t row_class) { return plans_[row_class]; }
  const FastPlan& operator[](std::uint32_t row_class) const { return plans_[row_class]; }
  friend bool operator==(const FastPlans&, const FastPlans&) = default;

 private:
  std::array<FastPlan, kRowClasses> plans_{};
};

}  // namespace kvasir::ffn
