// Makes parts of a file cold in a process that has it mapped, so that the next touch of them
// is a read from disk. For measuring only.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <vector>

#include "base/error.h"

namespace kvasir::cli {

struct FilePart {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// The share of those parts (0 to 1) that is in memory all the same afterwards: pages at the
// edges, and all of it where the kernel or the file system does not let go.
Result<double> evict(pid_t pid, const std::filesystem::path& file, const std::vector<FilePart>& parts);

}  // namespace kvasir::cli
