// Whether a file is still the one that was opened.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <optional>

namespace kvasir::hub {

struct FileIdentity {
  std::uint64_t device = 0, inode = 0, size = 0;
  std::int64_t modified_ns = 0;
  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

inline FileIdentity identity_of(const struct stat& info) {
  return {info.st_dev, info.st_ino, static_cast<std::uint64_t>(info.st_size),
          info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec};
}

inline std::optional<FileIdentity> identity_of(int fd) {
  struct stat info{};
  if (::fstat(fd, &info) != 0) return std::nullopt;
  return identity_of(info);
}

}  // namespace kvasir::hub
