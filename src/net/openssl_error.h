// The last error OpenSSL queued on this thread, as text; the queue is empty afterwards.
#pragma once

#include <openssl/err.h>

#include <string>

namespace kvasir::net {

inline std::string openssl_error_text() {
  const unsigned long code = ERR_peek_last_error();
  ERR_clear_error();
  if (code == 0) return "unknown error";
  const char* reason = ERR_reason_error_string(code);
  return reason != nullptr ? reason : "error " + std::to_string(code);
}

}  // namespace kvasir::net
