// For tests: random layers of experts, and the FFN as llama.cpp computes it.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "ffn/engine.h"
#include "ggml-cpp.h"

namespace kvasir::ffn::testing {

// One layer in the default CPU buffer, random weights, every tensor that the recipe names.
struct Layer {
  wire::Recipe recipe;
  ExpertTensors tensors;
  ggml_context_ptr context;
  ggml_backend_buffer_ptr buffer;
};
Layer random_layer(const wire::Recipe& recipe, ggml_type gate_up_type, ggml_type down_type, std::uint32_t seed);
// The slabs of the chosen experts alone, in that order.
Layer slice_layer(const Layer& layer, std::span<const std::uint32_t> experts);

std::vector<float> random_rows(std::size_t n, std::mt19937& rng);
// `n_used` distinct experts for each of `n_tokens` rows: [n_tokens][n_used].
std::vector<std::int32_t> random_ids(std::uint32_t n_expert, std::uint32_t n_used, std::uint32_t n_tokens,
                                     std::mt19937& rng);

// The whole [n_used, n_tokens] call as llama.cpp lays it out: [n_tokens][n_used][n_embd].
std::vector<float> full_call(const Layer& layer, std::span<const float> x, std::span<const std::int32_t> ids,
                             std::uint32_t n_used, int n_threads);

}  // namespace kvasir::ffn::testing
