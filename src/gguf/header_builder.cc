#include "gguf/header_builder.h"

#include "base/check.h"
#include "base/math.h"
#include "gguf/reader.h"

namespace kvasir::gguf {
namespace {

void put_string(ByteWriter& out, std::string_view text) {
  out.put<std::uint64_t>(text.size());
  out.put_bytes(text);
}

std::uint64_t align_up(std::uint64_t size) {
  const auto aligned = checked_align_up(size, kDefaultAlignment);
  KVASIR_CHECK(aligned.has_value());
  return *aligned;
}

}  // namespace

void HeaderBuilder::add_key(std::string_view key) {
  ByteWriter out(key_values_);
  put_string(out, key);
  ++n_key_values_;
}

void HeaderBuilder::add_u32(std::string_view key, std::uint32_t value) {
  add_key(key);
  ByteWriter out(key_values_);
  out.put<std::uint32_t>(GGUF_TYPE_UINT32);
  out.put(value);
}

void HeaderBuilder::add_f32(std::string_view key, float value) {
  add_key(key);
  ByteWriter out(key_values_);
  out.put<std::uint32_t>(GGUF_TYPE_FLOAT32);
  out.put(value);
}

void HeaderBuilder::add_bool(std::string_view key, bool value) {
  add_key(key);
  ByteWriter out(key_values_);
  out.put<std::uint32_t>(GGUF_TYPE_BOOL);
  out.put<std::uint8_t>(value ? 1 : 0);
}

void HeaderBuilder::add_string(std::string_view key, std::string_view value) {
  add_key(key);
  ByteWriter out(key_values_);
  out.put<std::uint32_t>(GGUF_TYPE_STRING);
  put_string(out, value);
}

void HeaderBuilder::add_u32_array(std::string_view key, std::span<const std::uint32_t> values) {
  add_key(key);
  ByteWriter out(key_values_);
  out.put<std::uint32_t>(GGUF_TYPE_ARRAY);
  out.put<std::uint32_t>(GGUF_TYPE_UINT32);
  out.put<std::uint64_t>(values.size());
  out.put_bytes(std::as_bytes(values));
}

void HeaderBuilder::add_i32_array(std::string_view key, std::span<const std::int32_t> values) {
  add_key(key);
  ByteWriter out(key_values_);
  out.put<std::uint32_t>(GGUF_TYPE_ARRAY);
  out.put<std::uint32_t>(GGUF_TYPE_INT32);
  out.put<std::uint64_t>(values.size());
  out.put_bytes(std::as_bytes(values));
}

void HeaderBuilder::add_string_array(std::string_view key, std::span<const std::string> values) {
  add_key(key);
  ByteWriter out(key_values_);
  out.put<std::uint32_t>(GGUF_TYPE_ARRAY);
  out.put<std::uint32_t>(GGUF_TYPE_STRING);
  out.put<std::uint64_t>(values.size());
  for (const std::string& value : values) put_string(out, value);
}

void HeaderBuilder::add_raw(std::string_view key, ByteSpan value) {
  add_key(key);
  ByteWriter(key_values_).put_bytes(value);
}

std::uint64_t HeaderBuilder::add_tensor(std::string_view name, ggml_type type, const Shape& ne) {
  const auto nbytes = tensor_bytes(type, ne);
  KVASIR_CHECK(nbytes.has_value() && name.size() <= kMaxTensorNameBytes);
  std::uint32_t n_dims = kMaxDims;
  while (n_dims > 1 && ne[n_dims - 1] == 1) --n_dims;

  ByteWriter out(tensors_);
  put_string(out, name);
  out.put(n_dims);
  for (std::uint32_t i = 0; i < n_dims; ++i) out.put(ne[i]);
  out.put(static_cast<std::uint32_t>(type));
  const std::uint64_t offset = data_bytes_;
  out.put(offset);
  ++n_tensors_;
  data_bytes_ = align_up(offset + *nbytes);
  return offset;
}

Bytes HeaderBuilder::header() const {
  Bytes header;
  header.reserve(static_cast<std::size_t>(align_up(24 + key_values_.size() + tensors_.size())));
  ByteWriter out(header);
  out.put_bytes(std::string_view(GGUF_MAGIC));
  out.put<std::uint32_t>(GGUF_VERSION);
  out.put(n_tensors_);
  out.put(n_key_values_);
  out.put_bytes(key_values_);
  out.put_bytes(tensors_);
  header.resize(static_cast<std::size_t>(align_up(header.size())));
  return header;
}

}  // namespace kvasir::gguf
