// A model on a web server that serves byte ranges, read without downloading it: only the
// header and the experts that are wanted cross the network.
//
// http and https only, redirects included; from https never back to http.
#pragma once

#include <chrono>
#include <string>

#include "base/error.h"
#include "gguf/byte_source.h"

namespace kvasir::gguf {

struct HttpOptions {
  int attempts_max = 5;  // in a row without a single new byte
  std::chrono::milliseconds backoff{250};  // before the second attempt; doubles each time
  std::chrono::milliseconds connect_timeout{15000};
  // Below 1 KiB/s for this long, a transfer counts as failed.
  std::chrono::seconds stall_timeout{30};
};

bool is_url(const std::string& name);

// Asks for the size; refuses servers without ranges.
Result<SourcePtr> open_http_source(const std::string& url, const HttpOptions& options = {});

// A SourceOpener for names that may be URLs or paths.
Result<SourcePtr> open_any_source(const std::string& name);

}  // namespace kvasir::gguf
