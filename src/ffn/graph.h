// One ready-to-run ggml graph: a recipe over `n_pairs` gathered rows.
#pragma once

#include <cstdint>
#include <memory>

#include "ffn/engine.h"
#include "ffn/recipe_ops.h"
#include "ggml-cpp.h"

namespace kvasir::ffn {

struct GraphKey {
  wire::Recipe recipe;
  ExpertTensors tensors;
  std::uint32_t n_pairs = 0;
  friend bool operator==(const GraphKey&, const GraphKey&) = default;
};
struct GraphKeyHash {
  std::size_t operator()(const GraphKey& key) const;
};

// What the recipe names for a role; a slice may hold side tensors that its architecture never uses.
struct MatrixTensors {
  ggml_tensor* matrix = nullptr;
  ggml_tensor* scale = nullptr;
  ggml_tensor* bias = nullptr;
  static MatrixTensors of(const wire::Recipe& recipe, const ExpertTensors& tensors, MatrixRole role);
};

struct FfnGraph {
  ggml_context_ptr context;      // owns the tensors below, not their data
  ggml_cgraph* graph = nullptr;
  ggml_tensor* x = nullptr;      // [n_embd, 1, n_pairs] f32
  ggml_tensor* ids = nullptr;    // [1, n_pairs] i32, local expert ids
  ggml_tensor* out = nullptr;    // [n_embd, 1, n_pairs] f32

  // Builds the operations, in llama.cpp's order; no data is allocated. The recipe and the
  // tensors have passed Engine::check. Refused if the device lacks one of the operations.
  static Result<FfnGraph> build(const GraphKey& key, ggml_backend_dev_t device);
};

// Bytes of device memory one pair needs at most: an upper bound of ggml's own allocation.
std::uint64_t arena_bytes_per_pair(const wire::Recipe& recipe);

}  // namespace kvasir::ffn
