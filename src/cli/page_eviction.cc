#include "cli/page_eviction.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <format>
#include <fstream>
#include <string>

namespace kvasir::cli {
namespace {

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// Where the process has the parts mapped.
std::vector<iovec> mapped_ranges(pid_t pid, const std::filesystem::path& file, const std::vector<FilePart>& parts) {
  std::vector<iovec> out;
  std::ifstream maps(std::format("/proc/{}/maps", pid));
  for (std::string line; std::getline(maps, line);) {
    std::uint64_t begin = 0, end = 0, offset = 0;
    if (!line.ends_with(' ' + file.string()) || std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %*s %" SCNx64, &begin, &end, &offset) != 3)
      continue;
    for (const FilePart& part : parts) {
      const std::uint64_t first = std::max(part.offset, offset);
      const std::uint64_t last = std::min(part.offset + part.bytes, offset + (end - begin));
      if (first < last) out.push_back({reinterpret_cast<void*>(begin + (first - offset)), last - first});
    }
  }
  return out;
}

// Whole pages inside each range: neighbours share the ones at the edges.
std::vector<iovec> whole_pages(std::vector<iovec> ranges) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  for (iovec& range : ranges) {
    const auto begin = reinterpret_cast<std::uintptr_t>(range.iov_base);
    const std::uintptr_t first = (begin + page - 1) / page * page;
    const std::uintptr_t last = (begin + range.iov_len) / page * page;
    range = {reinterpret_cast<void*>(first), last > first ? last - first : 0};
  }
  std::erase_if(ranges, [](const iovec& range) { return range.iov_len == 0; });
  return ranges;
}

Result<double> resident_share(int fd, const std::vector<FilePart>& parts) {
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  std::uint64_t n_pages = 0, n_resident = 0;
  for (const FilePart& part : parts) {
    const std::uint64_t first = part.offset / page * page;
    const std::uint64_t bytes = part.offset + part.bytes - first;
    void* view = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(first));
    if (view == MAP_FAILED) return fatal("cannot map the file to see what of it is in memory: " + errno_text(errno) + ".");
    std::vector<unsigned char> states((bytes + page - 1) / page);
    if (mincore(view, bytes, states.data()) == 0) {
      n_pages += states.size();
      n_resident += static_cast<std::uint64_t>(std::ranges::count_if(states, [](unsigned char s) { return (s & 1) != 0; }));
    }
    munmap(view, bytes);
  }
  return n_pages == 0 ? 0.0 : static_cast<double>(n_resident) / static_cast<double>(n_pages);
}

}  // namespace

Result<double> evict(pid_t pid, const std::filesystem::path& file, const std::vector<FilePart>& parts) {
  const Fd fd(open(file.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) return fix_input(std::format("cannot open '{}': {}.", file.string(), errno_text(errno)));
  const Fd process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (process.get() < 0) return fatal("cannot reach the process: " + errno_text(errno) + ".");
  const std::vector<iovec> ranges = whole_pages(mapped_ranges(pid, file, parts));
  // One call a range: the kernel takes at most IOV_MAX, and stops at the first it cannot do.
  for (const iovec& range : ranges) syscall(SYS_process_madvise, process.get(), &range, 1, MADV_PAGEOUT, 0);
  for (const FilePart& part : parts)
    posix_fadvise(fd.get(), static_cast<off_t>(part.offset), static_cast<off_t>(part.bytes), POSIX_FADV_DONTNEED);
  return resident_share(fd.get(), parts);
}

}  // namespace kvasir::cli
