#include "cli/node_token.h"

#include <cstdlib>
#include <format>
#include <fstream>

namespace kvasir::cli {

Result<std::string> read_node_token(const std::string& file, const char* variable) {
  if (file.empty()) {
    const char* token = std::getenv(variable);
    return std::string(token ? token : "");
  }
  std::ifstream in(file);
  std::string token;
  if (!std::getline(in, token) || token.empty())
    return fix_input(std::format("'{}' holds no token on its first line.", file));
  return token;
}

}  // namespace kvasir::cli
