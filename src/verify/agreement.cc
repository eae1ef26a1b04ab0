#include "verify/agreement.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"

namespace kvasir::verify {

template <typename T>
void Agreement::add_values(std::span<const double> truth, std::span<const T> value) {
  KVASIR_CHECK(truth.size() == value.size());
  n_ += truth.size();
  for (std::size_t i = 0; i < truth.size(); ++i) {
    const double a = truth[i], b = value[i], difference = std::abs(a - b);
    if (!std::isfinite(a) || !std::isfinite(b)) {
      finite_ = false;
      max_abs_ = std::numeric_limits<double>::infinity();
      continue;
    }
    dot_ += a * b;
    truth_squared_ += a * a;
    value_squared_ += b * b;
    max_abs_ = std::max(max_abs_, difference);
    max_truth_ = std::max(max_truth_, std::abs(a));
    excess_ = std::max(excess_, difference / (1 + std::abs(a)));
  }
}

void Agreement::add(std::span<const double> truth, std::span<const float> value) { add_values(truth, value); }
void Agreement::add(std::span<const double> truth, std::span<const double> value) { add_values(truth, value); }

void Agreement::add(const Agreement& other) {
  n_ += other.n_;
  dot_ += other.dot_;
  truth_squared_ += other.truth_squared_;
  value_squared_ += other.value_squared_;
  max_abs_ = std::max(max_abs_, other.max_abs_);
  max_truth_ = std::max(max_truth_, other.max_truth_);
  excess_ = std::max(excess_, other.excess_);
  finite_ = finite_ && other.finite_;
}

double Agreement::cosine() const {
  if (!finite_) return 0;
  if (truth_squared_ == 0 && value_squared_ == 0) return 1;
  if (truth_squared_ == 0 || value_squared_ == 0) return 0;
  return dot_ / (std::sqrt(truth_squared_) * std::sqrt(value_squared_));
}

double Agreement::max_relative() const { return max_truth_ > 0 ? max_abs_ / max_truth_ : max_abs_; }

}  // namespace kvasir::verify
