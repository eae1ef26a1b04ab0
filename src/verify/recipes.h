// The recipe of a layer, from a file alone. A running backbone reads it off llama.cpp's graph
// (stand_in.h gets that one); a file says the layout, the biases and the scales, and the
// architecture's name the activation.
#pragma once

#include <string>

#include "gguf/moe_model.h"
#include "wire/recipe.h"

namespace kvasir::verify {

Result<wire::Recipe> recipe_from_file(const gguf::MoeModel& model, const gguf::LayerExperts& layer);

// "split swiglu 256->512->256 +bias", for people.
std::string describe(const wire::Recipe& recipe);

}  // namespace kvasir::verify
