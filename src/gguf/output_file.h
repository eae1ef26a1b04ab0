// A file that appears at its path whole or not at all. Until commit() it has no name where
// the filesystem allows (O_TMPFILE: a killed process leaves nothing), else it is a
// PATH.partial-XXXXXX beside the target that is removed on every error.
//
// Thread contract: write_at and read_at may be called concurrently on disjoint ranges.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/bytes.h"
#include "base/error.h"
#include "gguf/byte_source.h"

namespace kvasir::gguf {

class OutputFile {
 public:
  // Refuses a folder, and a path in a folder that does not exist.
  static Result<OutputFile> create(const std::string& path);
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  ~OutputFile();  // discards what was not committed

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }

  // The size at once; what is never written reads as zeros and takes no space.
  Status set_size(std::uint64_t size) const;
  Status write_at(std::uint64_t offset, ByteSpan bytes) const;
  Status read_at(std::uint64_t offset, std::span<std::byte> out) const;
  // Copies a range of a source, in the kernel where both are files that allow it.
  Status copy_from(const ByteSource& source, std::uint64_t source_offset, std::uint64_t offset,
                   std::uint64_t size) const;

  // Closes and moves to the path, replacing what was there.
  Status commit();

 private:
  OutputFile(std::string path, int fd, std::string temporary)
      : path_(std::move(path)), temporary_(std::move(temporary)), fd_(fd) {}
  std::unexpected<Error> write_error(int errnum) const;

  std::string path_;
  std::string temporary_;  // empty while the file has no name
  int fd_ = -1;
};

}  // namespace kvasir::gguf
