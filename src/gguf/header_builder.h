// Builds the bytes of a GGUF header (version 3): metadata, tensor records and padding, up to
// where the data begins. Own code rather than ggml's writer, so that values are copied from
// another file as raw bytes, and so that the size is known before the hashes are.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "gguf.h"
#include "gguf/ggml_type.h"

namespace kvasir::gguf {

class HeaderBuilder {
 public:
  // Keys must be new and not empty; tensor names new and within ggml's limit (checked only
  // by the tests: callers take both from files that were read with those checks).
  void add_u32(std::string_view key, std::uint32_t value);
  void add_f32(std::string_view key, float value);
  void add_bool(std::string_view key, bool value);
  void add_string(std::string_view key, std::string_view value);
  void add_u32_array(std::string_view key, std::span<const std::uint32_t> values);
  void add_i32_array(std::string_view key, std::span<const std::int32_t> values);
  void add_string_array(std::string_view key, std::span<const std::string> values);
  // Type tags and value as GgufFile::get_raw_value gives them.
  void add_raw(std::string_view key, ByteSpan value);

  // Returns where the data begin, relative to the data section; each starts aligned.
  std::uint64_t add_tensor(std::string_view name, ggml_type type, const Shape& ne);

  // Padded to the alignment: the data section begins at its end.
  Bytes header() const;
  // Of the data section, its last padding included.
  std::uint64_t data_bytes() const { return data_bytes_; }

 private:
  void add_key(std::string_view key);

  Bytes key_values_;
  Bytes tensors_;
  std::uint64_t n_key_values_ = 0;
  std::uint64_t n_tensors_ = 0;
  std::uint64_t data_bytes_ = 0;
};

}  // namespace kvasir::gguf
