#include "gguf/copy_runs.h"

#include <sys/stat.h>

#include <algorithm>
#include <format>

namespace kvasir::gguf {
namespace {

// Large against a system call and the waking of a thread that follows; small enough that what
// was just copied is still in the last-level cache for it.
constexpr std::uint64_t kChunkBytes = 4u << 20;

}  // namespace

std::uint64_t total_bytes(std::span<const CopyRun> runs) {
  std::uint64_t total = 0;
  for (const CopyRun& run : runs) total += run.size;
  return total;
}

Status copy_runs(const ModelFiles& files, std::span<const CopyRun> runs, const OutputFile& out,
                 const Progress& progress, const std::function<void(std::uint64_t offset)>& written) {
  const std::uint64_t total = total_bytes(runs);
  std::uint64_t done = 0;
  for (const CopyRun& run : runs) {
    const ByteSource& source = files.files()[run.file].source();
    for (std::uint64_t at = 0; at < run.size; at += kChunkBytes) {
      const std::uint64_t size = std::min(kChunkBytes, run.size - at);
      KVASIR_TRY(out.copy_from(source, run.source_offset + at, run.offset + at, size));
      if (written) written(run.offset + at + size);
      done += size;
      if (progress) progress(done, total);
    }
  }
  return {};
}

Status check_not_input(const ModelFiles& files, const std::string& path) {
  struct stat output {};
  if (::stat(path.c_str(), &output) != 0) return {};
  for (const GgufFile& file : files.files()) {
    struct stat input {};
    const int fd = file.source().file_descriptor();
    if (fd >= 0 && ::fstat(fd, &input) == 0 && input.st_dev == output.st_dev && input.st_ino == output.st_ino)
      return fix_input(std::format("the output '{}' is the model itself; choose another path.", path));
  }
  return {};
}

}  // namespace kvasir::gguf
