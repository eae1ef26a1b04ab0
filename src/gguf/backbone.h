// The backbone file: a model without its experts, for a machine that computes everything
// else. It loads in an unmodified llama.cpp; see placeholder.h for what stands in their place.
#pragma once

#include <string>

#include "base/error.h"
#include "gguf/copy_runs.h"
#include "gguf/moe_model.h"

namespace kvasir::gguf {

// Everything but expert weights is copied; the file is sparse where they were.
Status write_backbone(const MoeModel& model, const std::string& path, const Progress& progress = {});

}  // namespace kvasir::gguf
