// Bounds-checked reading of one GGUF file (versions 2 and 3, little-endian) that came from
// elsewhere. Every count, length, offset and product is checked against a named limit and
// the size of the file before anything is allocated or read.
//
// Values stay in the file: opening keeps keys, scalars and positions, so that the metadata
// of a model with a large vocabulary costs a walk through 64 KiB windows and no memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "gguf.h"
#include "gguf/byte_source.h"
#include "gguf/ggml_type.h"

namespace kvasir::gguf {

inline constexpr std::uint64_t kMaxKeyValues = 64 * 1024;
inline constexpr std::uint64_t kMaxTensors = 128 * 1024;
inline constexpr std::uint64_t kMaxKeyBytes = 1024;
inline constexpr std::uint64_t kMaxStringBytes = 16ull << 20;       // chat templates reach 100s of KB
inline constexpr std::uint64_t kMaxArrayElements = 16ull << 20;     // vocabularies and merges reach 1 M
inline constexpr std::uint64_t kMaxHeaderBytes = 512ull << 20;      // everything before the tensor data
inline constexpr std::uint64_t kMaxTensorNameBytes = GGML_MAX_NAME - 1;
inline constexpr std::uint32_t kMaxDims = 4;
inline constexpr std::uint64_t kMaxAlignment = 1ull << 20;
inline constexpr std::uint64_t kDefaultAlignment = 32;

struct KeyValue {
  std::string key;
  gguf_type type{};
  gguf_type element_type{};      // of an array
  std::uint64_t count = 1;       // elements of an array
  std::uint64_t data_offset = 0;  // in the file: the first byte of the value or first element
  std::uint64_t data_bytes = 0;   // string lengths included
  std::array<std::byte, 8> scalar{};  // numbers and bools, as stored
};

struct TensorInfo {
  std::string name;
  ggml_type type{};
  Shape ne{1, 1, 1, 1};
  std::uint64_t offset = 0;  // of the data, from the start of the file
  std::uint64_t nbytes = 0;
};

class GgufFile {
 public:
  static Result<GgufFile> open(SourcePtr source);

  const ByteSource& source() const { return *source_; }
  const std::string& name() const { return source_->name(); }
  std::uint32_t version() const { return version_; }
  std::uint64_t alignment() const { return alignment_; }
  std::uint64_t data_offset() const { return data_offset_; }
  const std::vector<KeyValue>& key_values() const { return key_values_; }  // in file order
  const std::vector<TensorInfo>& tensors() const { return tensors_; }      // in file order

  const KeyValue* find(std::string_view key) const;
  const TensorInfo* find_tensor(std::string_view name) const;

  // Scalars; nullopt if the key is missing or of another kind. Any integer type that holds a
  // value >= 0 will do: writers disagree about widths.
  std::optional<std::uint64_t> get_uint(std::string_view key) const;
  std::optional<bool> get_bool(std::string_view key) const;
  // Read from the file. Missing key, other type, more than `count_max` elements, or a value
  // that does not fit: an error that names the key.
  Result<std::string> get_string(std::string_view key) const;
  Result<std::vector<std::uint32_t>> get_u32_array(std::string_view key, std::uint64_t count_max) const;
  Result<std::vector<std::string>> get_string_array(std::string_view key, std::uint64_t count_max) const;
  // The value as it stands in the file, type tags included, to copy it into another file.
  Result<Bytes> get_raw_value(const KeyValue& kv) const;

 private:
  GgufFile() = default;

  SourcePtr source_;
  std::uint32_t version_ = 0;
  std::uint64_t alignment_ = kDefaultAlignment;
  std::uint64_t data_offset_ = 0;
  std::vector<KeyValue> key_values_;
  std::vector<TensorInfo> tensors_;
  std::vector<std::uint32_t> key_order_;     // indices sorted by key
  std::vector<std::uint32_t> tensor_order_;  // indices sorted by name
};

// Bytes of one element; 0 for strings, arrays and numbers that name no type.
std::size_t scalar_bytes(gguf_type type);

}  // namespace kvasir::gguf
