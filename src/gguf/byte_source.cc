#include "gguf/byte_source.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <format>

namespace kvasir::gguf {
namespace {

Status check_range(const ByteSource& source, std::uint64_t offset, std::size_t size) {
  if (offset > source.size() || size > source.size() - offset)
    return fix_input(std::format("'{}' ends at byte {} but bytes {}:{} are needed; the file is cut short, fetch "
                                 "it again.",
                                 source.name(), source.size(), offset, offset + size));
  return {};
}

class FileSource final : public ByteSource {
 public:
  FileSource(std::string path, int fd, std::uint64_t size) : path_(std::move(path)), fd_(fd), size_(size) {}
  FileSource(const FileSource&) = delete;
  FileSource& operator=(const FileSource&) = delete;
  ~FileSource() override { ::close(fd_); }

  const std::string& name() const override { return path_; }
  std::uint64_t size() const override { return size_; }
  int file_descriptor() const override { return fd_; }

  Status read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    KVASIR_TRY(check_range(*this, offset, out.size()));
    while (!out.empty()) {
      const ssize_t n = ::pread(fd_, out.data(), out.size(), static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return fatal(std::format("cannot read '{}': {}; check the disk.", path_, errno_text(errno)));
      if (n == 0)
        return fatal(std::format("'{}' became shorter than {} bytes while it was read; do not change a model in use.",
                                 path_, offset + out.size()));
      offset += static_cast<std::uint64_t>(n);
      out = out.subspan(static_cast<std::size_t>(n));
    }
    return {};
  }

 private:
  std::string path_;
  int fd_;
  std::uint64_t size_;
};

class MemorySource final : public ByteSource {
 public:
  MemorySource(std::string name, ByteSpan bytes) : name_(std::move(name)), bytes_(bytes) {}
  const std::string& name() const override { return name_; }
  std::uint64_t size() const override { return bytes_.size(); }
  Status read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    KVASIR_TRY(check_range(*this, offset, out.size()));
    if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
    return {};
  }

 private:
  std::string name_;
  ByteSpan bytes_;
};

}  // namespace

Result<SourcePtr> open_file_source(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return fix_input(std::format("cannot open '{}': {}; check the path.", path, errno_text(errno)));
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    return fix_input(std::format("'{}' is not a regular file; name a GGUF file.", path));
  }
  return std::make_shared<FileSource>(path, fd, static_cast<std::uint64_t>(info.st_size));
}

SourcePtr make_memory_source(std::string name, ByteSpan bytes) {
  return std::make_shared<MemorySource>(std::move(name), bytes);
}

}  // namespace kvasir::gguf
