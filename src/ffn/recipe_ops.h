// The operations of an expert FFN in llama.cpp's order, whatever multiplies the matrices.
#pragma once

#include <functional>

#include "ggml.h"
#include "wire/recipe.h"

namespace kvasir::ffn {

enum class MatrixRole : std::uint8_t { kGate, kUp, kGateUp, kDown };

// matrix · x [* scale] [+ bias] of a role; x [n_in, …].
using FfnPath = std::function<ggml_tensor*(MatrixRole role, ggml_tensor* x)>;

// The FFN's output. Null if activation and layout do not go together (Engine::check refuses those).
ggml_tensor* build_ffn(ggml_context* ctx, const wire::Recipe& recipe, ggml_tensor* x, const FfnPath& path);

}  // namespace kvasir::ffn
