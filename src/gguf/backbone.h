// The backbone file: a model without its experts, for a machine that computes everything
// else. It loads in an unmodified llama.cpp; see placeholder.h for what stands in their place.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "gguf/copy_runs.h"
#include "gguf/moe_model.h"
#include "gguf/placeholder.h"

namespace kvasir::gguf {

// What the file will contain; whatever no part of it covers reads as zeros.
struct BackboneLayout {
  struct Stamp {
    std::uint64_t offset = 0;
    std::array<std::byte, kPlaceholderBytes> bytes{};
  };
  Bytes header;  // at the start of the file
  std::vector<CopyRun> runs;
  std::vector<Stamp> stamps;  // the placeholders' first bytes
  std::uint64_t total_bytes = 0;

  static Result<BackboneLayout> make(const MoeModel& model);
};

// Everything but expert weights is copied; the file is sparse where they were.
Status write_backbone(const MoeModel& model, const std::string& path, const Progress& progress = {});

}  // namespace kvasir::gguf
