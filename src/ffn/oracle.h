// The expert FFN in double precision over dequantised weights: the value that every kernel
// approximates. Plain loops, no ggml operation, so that it shares no mistake with an engine.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ffn/engine.h"

namespace kvasir::ffn {

// One expert of a layer, dequantised once for any number of rows. Immutable; any thread.
class ExpertOracle {
 public:
  // The tensors lie in host memory and have passed Engine::check for the recipe; `expert` is
  // local. Nothing of them is kept.
  ExpertOracle(const wire::Recipe& recipe, const ExpertTensors& tensors, std::uint32_t expert);

  // `x` and `out` hold n_embd values. The order of every sum is fixed: equal weights and rows
  // give equal bits.
  void compute(std::span<const float> x, std::span<double> out) const;

 private:
  // matrix · x [* scale] [+ bias]
  struct Path {
    std::size_t n_in = 0;
    std::vector<float> matrix;  // rows of n_in; exact, every type dequantises to f32
    double scale = 1;
    std::vector<float> bias;  // empty: none
    template <typename T>
    void apply(std::span<const T> x, std::span<double> out) const;
  };
  static Path make_path(const ggml_tensor* matrix, const ggml_tensor* scale, const ggml_tensor* bias, std::uint32_t expert);

  wire::Recipe recipe_;
  Path gate_;  // kSplit only
  Path up_;    // kMerged: gate and up, one after the other
  Path down_;
};

}  // namespace kvasir::ffn
