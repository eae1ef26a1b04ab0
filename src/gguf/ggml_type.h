// ggml's tensor types, looked up without trusting the number or the shape.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "ggml.h"

namespace kvasir::gguf {

using Shape = std::array<std::uint64_t, 4>;  // ne[0] is the row length; unused dimensions are 1

// nullopt for numbers that name no type of the linked ggml (unknown or removed).
std::optional<ggml_type> type_from_number(std::uint32_t number);

// "Q4_K", in any case, as ggml names it.
std::optional<ggml_type> type_from_name(std::string_view name);

// Bytes of one row; nullopt unless n is a whole number of the type's blocks, or on overflow.
std::optional<std::uint64_t> row_bytes(ggml_type type, std::uint64_t n);

// Bytes of a tensor; nullopt as row_bytes, or if a product overflows or passes INT64_MAX.
std::optional<std::uint64_t> tensor_bytes(ggml_type type, const Shape& ne);

}  // namespace kvasir::gguf
