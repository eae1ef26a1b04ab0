// Node tokens, as every command takes them.
#pragma once

#include <string>

#include "base/error.h"

namespace kvasir::cli {

// The first line of `file`, or without one the variable's value (empty if it is not set). Not
// from an argument: a command line can be read by every user of the machine.
Result<std::string> read_node_token(const std::string& file, const char* variable = "KVASIR_TOKEN");

}  // namespace kvasir::cli
