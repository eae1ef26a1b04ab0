// How the programs that run for long write their log: lines for people, or JSON for a
// collector. No line holds a token.
#pragma once

#include <string>

#include "base/error.h"

namespace CLI {
class App;
}

namespace kvasir::cli {

struct LogOptions {
  std::string format = "text";  // or "json"
  bool quiet = false;           // warnings and errors only
  bool verbose = false;
  bool is_json() const { return format == "json"; }
};

// --log and --quiet.
void add_log_options(CLI::App& command, LogOptions& options);

// Of the default logger, on stderr. `pattern`: spdlog's, of the lines for people.
void start_log(const std::string& name, const LogOptions& options, const std::string& pattern);

}  // namespace kvasir::cli
