// Little-endian encoding field by field, and a bounds-checked read cursor.
// Nothing here trusts the bytes: every read past the end sets a sticky failure and gives 0.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

namespace kvasir {

using Bytes = std::vector<std::byte>;
using ByteSpan = std::span<const std::byte>;

static_assert(std::endian::native == std::endian::little, "Kvasir's hosts are little-endian");

template <typename T>
  requires std::is_arithmetic_v<T> || std::is_enum_v<T>
T load_le(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

template <typename T>
  requires std::is_arithmetic_v<T> || std::is_enum_v<T>
void store_le(std::byte* p, T value) {
  std::memcpy(p, &value, sizeof value);
}

// Appends to a byte vector.
class ByteWriter {
 public:
  explicit ByteWriter(Bytes& out) : out_(out) {}

  template <typename T>
    requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  void put(T value) {
    const std::size_t at = out_.size();
    out_.resize(at + sizeof value);
    store_le(out_.data() + at, value);
  }
  void put_bytes(ByteSpan bytes) { out_.insert(out_.end(), bytes.begin(), bytes.end()); }
  void put_bytes(std::string_view text) { put_bytes(std::as_bytes(std::span(text.data(), text.size()))); }

 private:
  Bytes& out_;
};

// Reads a span front to back. After the first short read ok() is false for good.
class ByteCursor {
 public:
  explicit ByteCursor(ByteSpan bytes) : rest_(bytes) {}

  template <typename T>
    requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  T get() {
    ByteSpan raw = get_bytes(sizeof(T));
    return raw.size() == sizeof(T) ? load_le<T>(raw.data()) : T{};
  }

  // Borrowed from the input; empty when fewer than `size` bytes are left.
  ByteSpan get_bytes(std::size_t size) {
    if (!ok_ || size > rest_.size()) {
      ok_ = false;
      return {};
    }
    ByteSpan out = rest_.first(size);
    rest_ = rest_.subspan(size);
    return out;
  }

  bool ok() const { return ok_; }
  bool at_end() const { return ok_ && rest_.empty(); }
  std::size_t left() const { return ok_ ? rest_.size() : 0; }

 private:
  ByteSpan rest_;
  bool ok_ = true;
};

}  // namespace kvasir
