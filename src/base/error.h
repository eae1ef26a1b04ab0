// Errors as values. Every fallible function returns Result<T>; the error says what the
// caller should do about it, and one sentence that a person can act on.
#pragma once

#include <expected>
#include <string>
#include <string_view>
#include <utility>

namespace kvasir {

// What the caller should do. A new value exists only where some caller reacts differently.
enum class ErrorAction {
  kFixInput,        // the request, file or flag is wrong; the sentence says what to change
  kRetryElsewhere,  // this peer cannot do it; another may
  kRetryLater,      // a limit is reached or a resource is away; the same call may work later
  kFatal,           // this process cannot go on with that object
};

std::string_view to_string(ErrorAction action);

struct Error {
  ErrorAction action;
  std::string message;  // one sentence, names the thing, says what to do; never a secret
};

template <typename T>
using Result = std::expected<T, Error>;
using Status = Result<void>;

inline std::unexpected<Error> fix_input(std::string message) {
  return std::unexpected(Error{ErrorAction::kFixInput, std::move(message)});
}
inline std::unexpected<Error> retry_elsewhere(std::string message) {
  return std::unexpected(Error{ErrorAction::kRetryElsewhere, std::move(message)});
}
inline std::unexpected<Error> retry_later(std::string message) {
  return std::unexpected(Error{ErrorAction::kRetryLater, std::move(message)});
}
inline std::unexpected<Error> fatal(std::string message) {
  return std::unexpected(Error{ErrorAction::kFatal, std::move(message)});
}

// "cannot open 'x': No such file or directory" for the current or given errno.
std::string errno_text(int errnum);

}  // namespace kvasir

// Return the error of `expr` (a Result) to the caller, or go on.
#define KVASIR_TRY(expr)                                            \
  do {                                                              \
    auto kvasir_try_result = (expr);                                \
    if (!kvasir_try_result)                                         \
      return std::unexpected(std::move(kvasir_try_result).error()); \
  } while (0)

#define KVASIR_CONCAT_(a, b) a##b
#define KVASIR_CONCAT(a, b) KVASIR_CONCAT_(a, b)
#define KVASIR_ASSIGN_(tmp, decl, expr)                               \
  auto tmp = (expr);                                                  \
  if (!tmp) return std::unexpected(std::move(tmp).error());           \
  decl = *std::move(tmp)
// KVASIR_ASSIGN(auto x, f()): declare x from a Result, or return its error.
#define KVASIR_ASSIGN(decl, expr) KVASIR_ASSIGN_(KVASIR_CONCAT(kvasir_assign_, __LINE__), decl, expr)
