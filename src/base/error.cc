#include "base/error.h"

#include <system_error>

namespace kvasir {

std::string_view to_string(ErrorAction action) {
  switch (action) {
    case ErrorAction::kFixInput: return "fix-input";
    case ErrorAction::kRetryElsewhere: return "retry-elsewhere";
    case ErrorAction::kRetryLater: return "retry-later";
    case ErrorAction::kFatal: return "fatal";
  }
  return "unknown";
}

std::string errno_text(int errnum) { return std::generic_category().message(errnum); }

}  // namespace kvasir
