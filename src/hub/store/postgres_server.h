// For tests: a PostgreSQL server of its own, from the distribution's package, in a temporary
// folder, reachable by a Unix socket only; gone with the object (or with the process).
#pragma once

#include <memory>
#include <string>

#include "base/error.h"

namespace kvasir::hub {

class PostgresServer {
 public:
  // An error where the package is not installed.
  static Result<std::unique_ptr<PostgresServer>> start();
  virtual ~PostgresServer() = default;
  virtual const std::string& url() const = 0;
  virtual Status restart() = 0;  // ungracefully, as after a crash
};

}  // namespace kvasir::hub
