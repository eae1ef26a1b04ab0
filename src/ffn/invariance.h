// How many rows of one expert may share a call without changing each other's bits.
//
// ggml's CPU kernels are not batch-invariant: for K-quants and the IQ types (ggml 0.27,
// x86-64 with AVX2 or AVX-512) 1 to 7 rows each have the bits of the row alone, and from 8
// rows on another kernel runs. Float and legacy types showed no threshold. Nothing in ggml
// promises any of this, so the table is only an upper bound and a probe decides.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>

#include "ffn/engine.h"
#include "ggml-cpp.h"

namespace kvasir::ffn {

inline constexpr std::uint32_t kInvariantRowsMax = 16;

// The table: rows per call at most for a matrix type; 1 for types nobody has measured.
std::uint32_t invariant_rows_limit(ggml_type type);

// The largest n <= limit such that, for every count up to n, each row of a product with
// expert 0 of `matrix` [n_in, n_out, n_local] has the bits of that row alone. Runs about
// limit^2 / 2 rows on the backend.
Result<std::uint32_t> probe_invariant_rows(ggml_backend_t backend, ggml_tensor* matrix, std::uint32_t limit);

// Probes once per type and shape.
class InvariantRows {
 public:
  // Rows per expert and call for all matrices of a layer.
  Result<std::uint32_t> of(ggml_backend_t backend, const wire::Recipe& recipe, const ExpertTensors& tensors);

 private:
  std::map<std::tuple<ggml_type, std::int64_t, std::int64_t>, std::uint32_t> known_;
};

}  // namespace kvasir::ffn
