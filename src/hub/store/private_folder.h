// Folders and files that only their owner may read.
#pragma once

#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <format>

#include "base/error.h"

namespace kvasir::hub {

// Creates the folder 0700, parents included, or takes one that exists. Refuses a path that is
// something else.
inline Status make_private_folder(const std::filesystem::path& path) {
  std::error_code error;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), error);
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
    return fix_input(std::format("cannot make the folder '{}': {}; choose another.", path.string(), errno_text(errno)));
  if (!std::filesystem::is_directory(path, error))
    return fix_input(std::format("'{}' is not a folder; choose another.", path.string()));
  return {};
}

}  // namespace kvasir::hub
