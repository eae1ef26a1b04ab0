// docs/configuration.md lists exactly the variables the plugin knows, with the same values.

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <string>

#include "plugin/config.h"

namespace kvasir::plugin {
namespace {

// Text between the n-th pair of backticks of a table row; "\|" stands for "|" there.
std::string quoted(const std::string& row, int n) {
  std::size_t begin = 0, end = 0;
  for (int i = 0; i <= n; ++i) {
    begin = row.find('`', i == 0 ? 0 : end + 1);
    end = begin == std::string::npos ? begin : row.find('`', begin + 1);
    if (end == std::string::npos) return "";
  }
  std::string text = row.substr(begin + 1, end - begin - 1);
  for (std::size_t at; (at = text.find("\\|")) != std::string::npos;) text.erase(at, 1);
  return text;
}

TEST(ConfigDocument, HasTheVariablesOfTheCode) {
  const char* source = std::getenv("KVASIR_SOURCE_DIR");
  ASSERT_NE(source, nullptr);
  std::ifstream in(std::string(source) + "/docs/configuration.md");
  ASSERT_TRUE(in);
  std::map<std::string, std::string> documented;
  for (std::string line; std::getline(in, line) && !line.starts_with("## ");)  // the first section is the plugin's
    if (line.starts_with("| `KVASIR_")) documented[quoted(line, 0)] = quoted(line, 1);
  std::map<std::string, std::string> known;
  for (const Variable& v : variables()) known[std::string(v.name)] = v.values;
  EXPECT_EQ(documented, known);
}

}  // namespace
}  // namespace kvasir::plugin
