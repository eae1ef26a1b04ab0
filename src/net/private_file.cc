#include "net/private_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <format>
#include <string>

#include "net/fd.h"

namespace kvasir::net {

namespace fs = std::filesystem;

Result<std::optional<Bytes>> read_private_file(const fs::path& path, off_t bytes_max) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!fd && errno == ENOENT) return std::nullopt;
  struct stat info {};
  if (!fd || ::fstat(fd.get(), &info) != 0)
    return fix_input(std::format("cannot read '{}': {}; check who owns it.", path.string(), errno_text(errno)));
  if (!S_ISREG(info.st_mode) || info.st_size > bytes_max)
    return fix_input(std::format("'{}' is not a key file; delete it to get a new one.", path.string()));
  if ((info.st_mode & 077) != 0)
    return fix_input(std::format(
        "others can read the key in '{}'; run chmod 600 on it, or delete it to get a new one.", path.string()));
  Bytes bytes(static_cast<std::size_t>(info.st_size));
  std::size_t at = 0;
  while (at < bytes.size()) {
    const ssize_t n = ::read(fd.get(), bytes.data() + at, bytes.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return fatal(std::format("cannot read '{}': {}.", path.string(), errno_text(errno)));
    if (n == 0) break;
    at += static_cast<std::size_t>(n);
  }
  bytes.resize(at);
  return bytes;
}

Result<bool> create_private_file(const fs::path& path, ByteSpan bytes) {
  std::string temporary = path.string() + ".XXXXXX";
  const auto failed = [&](int errnum) {
    return fatal(std::format("cannot write '{}': {}; check the directory and the space on its disk.", path.string(),
                             errno_text(errnum)));
  };
  const Fd fd(::mkostemp(temporary.data(), O_CLOEXEC));  // mode 0600
  if (!fd) return failed(errno);
  const auto written = [&]() -> int {
    while (!bytes.empty()) {
      const ssize_t n = ::write(fd.get(), bytes.data(), bytes.size());
      if (n < 0 && errno != EINTR) return errno;
      if (n > 0) bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
    if (::fsync(fd.get()) != 0) return errno;
    return ::link(temporary.c_str(), path.c_str()) == 0 ? 0 : errno;
  }();
  ::unlink(temporary.c_str());
  if (written == EEXIST) return false;
  if (written != 0) return failed(written);
  return true;
}

}  // namespace kvasir::net
