// Reading JSON that a stranger sent: every field's kind and bounds are checked, and what is
// wrong is said in a sentence.
#pragma once

#include <cstdint>
#include <format>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"

namespace kvasir::hub {

class JsonInput {
 public:
  // The text must be one JSON object.
  static Result<JsonInput> parse(std::string_view text) {
    auto value = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (value.is_discarded() || !value.is_object()) return fix_input("the body must be one JSON object.");
    return JsonInput(std::move(value));
  }
  explicit JsonInput(nlohmann::json value) : value_(std::move(value)) {}

  const nlohmann::json* find(std::string_view name) const {
    const auto found = value_.find(name);
    return found == value_.end() || found->is_null() ? nullptr : &*found;
  }

  // Of printable characters.
  Result<std::string> text(std::string_view name, std::size_t bytes_max) const {
    KVASIR_ASSIGN(const auto value, optional_text(name, bytes_max));
    if (!value) return fix_input(std::format("'{}' is missing; it is a text.", name));
    return *value;
  }
  Result<std::optional<std::string>> optional_text(std::string_view name, std::size_t bytes_max) const {
    const auto* value = find(name);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) return fix_input(std::format("'{}' must be a text.", name));
    const auto& out = value->get_ref<const std::string&>();
    if (out.size() > bytes_max) return fix_input(std::format("'{}' is longer than {} bytes.", name, bytes_max));
    for (const unsigned char c : out)
      if (c < 0x20 || c == 0x7f) return fix_input(std::format("'{}' has a control character in it.", name));
    return out;
  }

  Result<std::optional<std::uint64_t>> optional_uint(std::string_view name, std::uint64_t max = INT64_MAX) const {
    const auto* value = find(name);
    if (value == nullptr) return std::nullopt;
    KVASIR_ASSIGN(const std::uint64_t out, to_uint(*value, name, max));
    return out;
  }
  // Any finite number that is not negative.
  Result<std::optional<double>> optional_number(std::string_view name) const {
    const auto* value = find(name);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number() || !(value->get<double>() >= 0) || value->get<double>() > 1e300)
      return fix_input(std::format("'{}' must be a number, 0 or more.", name));
    return value->get<double>();
  }
  Result<bool> flag(std::string_view name) const {
    const auto* value = find(name);
    if (value == nullptr) return false;
    if (!value->is_boolean()) return fix_input(std::format("'{}' must be true or false.", name));
    return value->get<bool>();
  }

  static Result<std::uint64_t> to_uint(const nlohmann::json& value, std::string_view name, std::uint64_t max) {
    // Older clients write whole numbers as floats.
    if (value.is_number_float() && value.get<double>() >= 0 && value.get<double>() < 9e15 &&
        static_cast<double>(static_cast<std::uint64_t>(value.get<double>())) == value.get<double>() &&
        static_cast<std::uint64_t>(value.get<double>()) <= max)
      return static_cast<std::uint64_t>(value.get<double>());
    if (!value.is_number_integer() || (!value.is_number_unsigned() && value.get<std::int64_t>() < 0) ||
        value.get<std::uint64_t>() > max)
      return fix_input(std::format("'{}' must be a whole number from 0 to {}.", name, max));
    return value.get<std::uint64_t>();
  }

 private:
  nlohmann::json value_;
};

// The hub's own JSON as text; what came from files and peers may not be UTF-8.
inline std::string dump(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace kvasir::hub
