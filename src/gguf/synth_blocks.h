// Random weights made directly in a tensor type's stored form, without a full-precision
// copy: random bits everywhere, and scales set so that the weights have a wanted spread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ggml.h"

namespace kvasir::gguf {

// F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, IQ4_XS, MXFP4.
bool can_synthesize(ggml_type type);

// Fills whole blocks. Weights are finite, have a mean near 0 and a standard deviation within
// a factor of 1.5 of `deviation`. The same key gives the same bytes.
void fill_random_weights(ggml_type type, float deviation, std::uint64_t key, std::span<std::byte> out);

// f32 values uniform in [low, high).
void fill_random_f32(float low, float high, std::uint64_t key, std::span<std::byte> out);

}  // namespace kvasir::gguf
