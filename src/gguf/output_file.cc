#include "gguf/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <format>
#include <vector>

namespace kvasir::gguf {
namespace {

// Fits a core's L2 cache, so that the copy out of it reads no memory.
constexpr std::size_t kCopyBufferBytes = 256 * 1024;

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Errors by which copy_file_range says that it does not do this pair of files.
bool is_unsupported(int errnum) {
  return errnum == EXDEV || errnum == EINVAL || errnum == ENOSYS || errnum == EOPNOTSUPP || errnum == EBADF ||
      errnum == EPERM;
}

}  // namespace

Result<OutputFile> OutputFile::create(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode))
    return fix_input(std::format("cannot write '{}': it is not a regular file; choose another output path.", path));
  const std::string folder = folder_of(path);
  // Without /proc an unnamed file cannot be given its name.
  if (::access("/proc/self/fd", X_OK) == 0) {
    const int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0666);
    if (fd >= 0) return OutputFile(path, fd, "");
  }
  std::string temporary = path + ".partial-XXXXXX";
  const int fd = ::mkostemp(temporary.data(), O_CLOEXEC);
  if (fd < 0)
    return fix_input(std::format("cannot write '{}': {}; check the folder and its permissions.", path,
                                 errno_text(errno)));
  const mode_t mask = ::umask(0);
  ::umask(mask);
  ::fchmod(fd, 0666 & ~mask);
  return OutputFile(path, fd, std::move(temporary));
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)), temporary_(std::move(other.temporary_)), fd_(other.fd_) {
  other.fd_ = -1;
  other.temporary_.clear();
}

OutputFile::~OutputFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

std::unexpected<Error> OutputFile::write_error(int errnum) const {
  const bool full = errnum == ENOSPC || errnum == EDQUOT || errnum == EFBIG;
  return fatal(std::format("cannot write '{}': {}; {}.", path_, errno_text(errnum),
                           full ? "free some space or write elsewhere (nothing was left behind)"
                               : "check the disk and its permissions"));
}

Status OutputFile::set_size(std::uint64_t size) const {
  if (::ftruncate(fd_, static_cast<off_t>(size)) != 0) return write_error(errno);
  return {};
}

Status OutputFile::write_at(std::uint64_t offset, ByteSpan bytes) const {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return write_error(errno);
    if (n == 0) return write_error(ENOSPC);
    offset += static_cast<std::uint64_t>(n);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
  return {};
}

Status OutputFile::read_at(std::uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t n = ::pread(fd_, out.data(), out.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      return fatal(std::format("cannot read back '{}': {}; check the disk.", path_, errno_text(n < 0 ? errno : EIO)));
    offset += static_cast<std::uint64_t>(n);
    out = out.subspan(static_cast<std::size_t>(n));
  }
  return {};
}

Status OutputFile::copy_from(const ByteSource& source, std::uint64_t source_offset, std::uint64_t offset,
                             std::uint64_t size) const {
  while (size > 0 && source.file_descriptor() >= 0) {
    auto from = static_cast<off_t>(source_offset);
    auto to = static_cast<off_t>(offset);
    const ssize_t n = ::copy_file_range(source.file_descriptor(), &from, fd_, &to, static_cast<std::size_t>(size), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && !is_unsupported(errno)) return write_error(errno);
    // Not supported, or the end of a file that became shorter: the loop below does it, or says so.
    if (n <= 0) break;
    source_offset += static_cast<std::uint64_t>(n);
    offset += static_cast<std::uint64_t>(n);
    size -= static_cast<std::uint64_t>(n);
  }
  const std::uint64_t buffer_bytes = std::max(kCopyBufferBytes, source.read_ahead_bytes());
  Bytes buffer(static_cast<std::size_t>(std::min(size, buffer_bytes)));
  while (size > 0) {
    const std::span<std::byte> part(buffer.data(),
                                    static_cast<std::size_t>(std::min<std::uint64_t>(size, buffer.size())));
    KVASIR_TRY(source.read_at(source_offset, part));
    KVASIR_TRY(write_at(offset, part));
    source_offset += part.size();
    offset += part.size();
    size -= part.size();
  }
  return {};
}

Status OutputFile::commit() {
  if (temporary_.empty()) {
    // linkat cannot replace a file, so the file gets a name of its own first.
    const std::string self = std::format("/proc/self/fd/{}", fd_);
    for (int attempt = 0;; ++attempt) {
      const std::string name = std::format("{}.partial-{}-{}", path_, ::getpid(), attempt);
      if (::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0) {
        temporary_ = name;
        break;
      }
      if (errno != EEXIST) return write_error(errno);
    }
  }
  // Some filesystems report a full disk only here.
  const int fd = fd_;
  fd_ = -1;
  if (::close(fd) != 0) return write_error(errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) return write_error(errno);
  temporary_.clear();
  return {};
}

}  // namespace kvasir::gguf
