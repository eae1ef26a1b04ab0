// Byte ranges of a model's files that go unchanged into another file.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "base/error.h"
#include "gguf/model_files.h"
#include "gguf/output_file.h"

namespace kvasir::gguf {

// Bytes [source_offset, +size) of file `file` of the model become [offset, +size) of the output.
struct CopyRun {
  std::uint32_t file = 0;
  std::uint64_t source_offset = 0;
  std::uint64_t offset = 0;
  std::uint64_t size = 0;
};

std::uint64_t total_bytes(std::span<const CopyRun> runs);

// Called from the working thread now and then, and at the end; bytes.
using Progress = std::function<void(std::uint64_t done, std::uint64_t total)>;

// Copies in the order of `runs`, in steps of at most 4 MiB; `written` (if any) hears, after
// each step, up to which offset of the output everything is there.
Status copy_runs(const ModelFiles& files, std::span<const CopyRun> runs, const OutputFile& out,
                 const Progress& progress, const std::function<void(std::uint64_t offset)>& written = {});

// Refuses an output path that is one of the model's own files.
Status check_not_input(const ModelFiles& files, const std::string& path);

}  // namespace kvasir::gguf
