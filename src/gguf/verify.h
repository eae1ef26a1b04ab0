// Comparing a slice or a backbone file with the model it was made from, byte by byte.
#pragma once

#include <cstdint>

#include "base/error.h"
#include "gguf/copy_runs.h"
#include "gguf/moe_model.h"

namespace kvasir::gguf {

struct Verified {
  std::uint64_t n_tensors = 0;
  std::uint64_t n_slabs = 0;  // a backbone file's placeholders count as one each
  std::uint64_t n_bytes = 0;  // compared
};

// The error names the first difference: a tensor missing or too many, another type or shape,
// a byte, a recorded hash or layer id that is not that of the data.
Result<Verified> verify(const MoeModel& made, const MoeModel& model, const Progress& progress = {});

}  // namespace kvasir::gguf
