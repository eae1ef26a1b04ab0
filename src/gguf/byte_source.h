// Where the bytes of a model come from: a file, memory, or a range-serving web server.
//
// Thread contract: read_at may be called from several threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "base/error.h"

namespace kvasir::gguf {

class ByteSource {
 public:
  virtual ~ByteSource() = default;

  // As the user named it; for error messages.
  virtual const std::string& name() const = 0;
  // Fixed when the source was opened.
  virtual std::uint64_t size() const = 0;
  // Fills all of `out` from `offset`, or says why not. A range past size() is an error, and
  // so is a file that has become shorter since: never a signal, never a short read.
  virtual Status read_at(std::uint64_t offset, std::span<std::byte> out) const = 0;

  // An open file for copy_file_range, or -1. Owned by the source.
  virtual int file_descriptor() const { return -1; }
  // How much to fetch at once when reading front to back.
  virtual std::size_t read_ahead_bytes() const { return 64 * 1024; }
};

using SourcePtr = std::shared_ptr<const ByteSource>;
// Opens the source of one name (a path or URL).
using SourceOpener = std::function<Result<SourcePtr>(const std::string& name)>;

// A regular file, read by pread.
Result<SourcePtr> open_file_source(const std::string& path);

// Borrowed memory, which must outlive the source.
SourcePtr make_memory_source(std::string name, ByteSpan bytes);

}  // namespace kvasir::gguf
