// How close two vectors of numbers are: the figures every part of `kvasir verify` reports.
#pragma once

#include <cstdint>
#include <span>

namespace kvasir::verify {

// Accumulates over any number of rows as if they were one long vector.
class Agreement {
 public:
  void add(std::span<const double> truth, std::span<const float> value);
  void add(std::span<const double> truth, std::span<const double> value);
  void add(const Agreement& other);

  // 1 if both are all zero; 0 if one is, or if a value is not finite.
  double cosine() const;
  double max_abs() const { return max_abs_; }          // of truth - value
  double max_relative() const;                         // the same over the largest |truth|
  // |truth - value| <= tolerance * (1 + |truth|) everywhere.
  bool all_close(double tolerance) const { return finite_ && excess_ <= tolerance; }
  std::uint64_t n_values() const { return n_; }

 private:
  template <typename T>
  void add_values(std::span<const double> truth, std::span<const T> value);

  std::uint64_t n_ = 0;
  double dot_ = 0, truth_squared_ = 0, value_squared_ = 0;
  double max_abs_ = 0, max_truth_ = 0;
  double excess_ = 0;  // the largest |truth - value| / (1 + |truth|)
  bool finite_ = true;
};

// The gate for computation that is not the reference's own, DESIGN's "fast": no further from
// the truth than the reference's CPU kernels, with a little room.
inline constexpr double kGateFactor = 1.5;
inline constexpr double kGateSlack = 1e-6;
// What f16 rows alone may take away, from values that came and go as f32.
inline constexpr double kF16CosineMin = 0.999999;
inline bool passes_gate(double cosine, double reference_cosine) {
  return 1 - cosine <= kGateFactor * (1 - reference_cosine) + kGateSlack;
}

}  // namespace kvasir::verify
