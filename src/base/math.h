// Integer arithmetic that cannot wrap, for sizes that come from files and peers.
#pragma once

#include <concepts>
#include <optional>

namespace kvasir {

template <std::integral T>
std::optional<T> checked_mul(T a, T b) {
  T out;
  if (__builtin_mul_overflow(a, b, &out)) return std::nullopt;
  return out;
}

template <std::integral T>
std::optional<T> checked_add(T a, T b) {
  T out;
  if (__builtin_add_overflow(a, b, &out)) return std::nullopt;
  return out;
}

// `alignment` must be a power of two.
template <std::unsigned_integral T>
std::optional<T> checked_align_up(T value, T alignment) {
  auto sum = checked_add<T>(value, alignment - 1);
  if (!sum) return std::nullopt;
  return *sum & ~(alignment - 1);
}

}  // namespace kvasir
