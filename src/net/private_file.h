// Files with keys in them: readable by their owner alone, and whole or not there at all.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <optional>

#include "base/bytes.h"
#include "base/error.h"

namespace kvasir::net {

// nullopt: there is no such file. Refuses one that others can read, or that is larger.
Result<std::optional<Bytes>> read_private_file(const std::filesystem::path& path, off_t bytes_max);
// 0600, by a rename that never replaces another file: false if one was there.
Result<bool> create_private_file(const std::filesystem::path& path, ByteSpan bytes);

}  // namespace kvasir::net
