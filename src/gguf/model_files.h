// A model as one set of tensors, whether it is one GGUF file or a split set
// (NAME-00001-of-0000N.gguf). Any part names the whole set.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "gguf/byte_source.h"
#include "gguf/reader.h"

namespace kvasir::gguf {

inline constexpr std::uint32_t kMaxParts = 512;  // one open file each

class ModelFiles {
 public:
  struct Entry {
    std::uint32_t file = 0;              // index into files()
    const TensorInfo* tensor = nullptr;  // owned by that file
  };

  static Result<ModelFiles> open(const std::string& name, const SourceOpener& opener = open_file_source);
  // One file that is not part of a set.
  static Result<ModelFiles> from_source(SourcePtr source);

  // Entries point into files_: movable, not copyable.
  ModelFiles(ModelFiles&&) = default;
  ModelFiles& operator=(ModelFiles&&) = default;

  // The first part carries the model's metadata.
  const GgufFile& metadata() const { return files_.front(); }
  const std::vector<GgufFile>& files() const { return files_; }
  const std::vector<Entry>& tensors() const { return tensors_; }  // part by part, in file order
  std::uint64_t total_bytes() const;

 private:
  ModelFiles() = default;
  Status merge();

  std::vector<GgufFile> files_;
  std::vector<Entry> tensors_;
};

// "dir/m-00002-of-00003.gguf" -> {"dir/m", 2, 3}. A query after the suffix (URLs) is kept
// in `tail`.
struct PartName {
  std::string prefix;
  std::uint32_t part = 0;  // from 1
  std::uint32_t n_parts = 0;
  std::string tail;  // ".gguf" and what follows

  static std::optional<PartName> parse(std::string_view name);
  std::string format(std::uint32_t part_number) const;
};

}  // namespace kvasir::gguf
