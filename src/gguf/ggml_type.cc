#include "gguf/ggml_type.h"

#include <algorithm>
#include <cctype>

#include "base/math.h"

namespace kvasir::gguf {

std::optional<ggml_type> type_from_number(std::uint32_t number) {
  if (number >= GGML_TYPE_COUNT) return std::nullopt;
  const auto type = static_cast<ggml_type>(number);
  // Removed types keep their slot with empty blocks.
  if (ggml_blck_size(type) <= 0 || ggml_type_size(type) == 0) return std::nullopt;
  return type;
}

std::optional<ggml_type> type_from_name(std::string_view name) {
  const auto same = [](char a, char b) {
    return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
  };
  for (std::uint32_t i = 0; i < GGML_TYPE_COUNT; ++i) {
    const auto type = type_from_number(i);
    if (type && std::ranges::equal(name, std::string_view(ggml_type_name(*type)), same)) return type;
  }
  return std::nullopt;
}

std::optional<std::uint64_t> row_bytes(ggml_type type, std::uint64_t n) {
  const auto block = static_cast<std::uint64_t>(ggml_blck_size(type));
  if (n % block != 0) return std::nullopt;
  return checked_mul<std::uint64_t>(n / block, ggml_type_size(type));
}

std::optional<std::uint64_t> tensor_bytes(ggml_type type, const Shape& ne) {
  // ggml keeps element counts in an int64.
  std::uint64_t elements = 1;
  for (std::uint64_t n : ne) {
    const auto product = checked_mul(elements, n);
    if (!product || *product > INT64_MAX) return std::nullopt;
    elements = *product;
  }
  std::optional<std::uint64_t> bytes = row_bytes(type, ne[0]);
  for (std::size_t i = 1; bytes && i < ne.size(); ++i) bytes = checked_mul(*bytes, ne[i]);
  if (!bytes || *bytes > INT64_MAX) return std::nullopt;
  return bytes;
}

}  // namespace kvasir::gguf
