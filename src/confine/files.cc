// Landlock. The C library has no wrappers of its three system calls.

#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <linux/landlock.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <format>

#include "confine/confine.h"

namespace kvasir::confine {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kReadFile = LANDLOCK_ACCESS_FS_READ_FILE;
constexpr std::uint64_t kRead = kReadFile | LANDLOCK_ACCESS_FS_READ_DIR;
constexpr std::uint64_t kWriteFile = LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_TRUNCATE;
// Plain files and folders; no devices, sockets, or links that lead elsewhere.
constexpr std::uint64_t kWrite = kRead | kWriteFile | LANDLOCK_ACCESS_FS_REMOVE_FILE | LANDLOCK_ACCESS_FS_REMOVE_DIR |
                                 LANDLOCK_ACCESS_FS_MAKE_REG | LANDLOCK_ACCESS_FS_MAKE_DIR | LANDLOCK_ACCESS_FS_REFER;
constexpr std::uint64_t kDevice = kRead | kWriteFile | LANDLOCK_ACCESS_FS_IOCTL_DEV;
constexpr std::uint64_t kOfFiles = kReadFile | kWriteFile | LANDLOCK_ACCESS_FS_EXECUTE | LANDLOCK_ACCESS_FS_IOCTL_DEV;

class Ruleset {
 public:
  // What is handled is forbidden unless a rule allows it.
  Ruleset() {
    const long version = ::syscall(SYS_landlock_create_ruleset, nullptr, 0, LANDLOCK_CREATE_RULESET_VERSION);
    if (version < 1) return;
    handled_ = LANDLOCK_ACCESS_FS_MAKE_SYM * 2 - 1;  // all of the first version
    if (version >= 2) handled_ |= LANDLOCK_ACCESS_FS_REFER;
    if (version >= 3) handled_ |= LANDLOCK_ACCESS_FS_TRUNCATE;
    if (version >= 5) handled_ |= LANDLOCK_ACCESS_FS_IOCTL_DEV;
    landlock_ruleset_attr attributes{};
    attributes.handled_access_fs = handled_;
    if (version >= 6) attributes.scoped = LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET;  // signals: see system_calls.cc
    fd_ = static_cast<int>(::syscall(SYS_landlock_create_ruleset, &attributes, sizeof attributes, 0));
  }
  ~Ruleset() {
    if (fd_ >= 0) ::close(fd_);
  }
  Ruleset(const Ruleset&) = delete;
  Ruleset& operator=(const Ruleset&) = delete;

  bool exists() const { return fd_ >= 0; }

  // A path that is not there needs no rule.
  void allow(const fs::path& path, std::uint64_t access) {
    const int at = ::open(path.c_str(), O_PATH | O_CLOEXEC);
    if (at < 0) return;
    struct stat status{};
    if (::fstat(at, &status) == 0) {
      if (!S_ISDIR(status.st_mode)) access &= kOfFiles;
      landlock_path_beneath_attr rule{.allowed_access = access & handled_, .parent_fd = at};
      if (::syscall(SYS_landlock_add_rule, fd_, LANDLOCK_RULE_PATH_BENEATH, &rule, 0) != 0 && !failed_) failed_ = errno;
    }
    ::close(at);
  }

  int enforce() const {
    if (failed_) return *failed_;
    return ::syscall(SYS_landlock_restrict_self, fd_, 0) == 0 ? 0 : errno;
  }

 private:
  int fd_ = -1;
  std::uint64_t handled_ = 0;
  std::optional<int> failed_;
};

// The folders of the libraries in use hold those that are loaded later: ggml's devices, name services.
int allow_folder_of(dl_phdr_info* info, std::size_t, void* ruleset) {
  if (const fs::path path = info->dlpi_name; path.has_parent_path())
    static_cast<Ruleset*>(ruleset)->allow(path.parent_path(), kRead);
  return 0;
}

}  // namespace

std::optional<std::string> confine_files(const Needs& needs) {
  Ruleset rules;
  if (!rules.exists()) return "this kernel has no landlock";
  for (const fs::path& path : needs.read) rules.allow(path, kRead);
  for (const fs::path& path : needs.write) rules.allow(path, kWrite);

  ::dl_iterate_phdr(allow_folder_of, &rules);
  std::error_code ignored;
  if (const fs::path self = fs::read_symlink("/proc/self/exe", ignored); self.has_parent_path())
    rules.allow(self.parent_path(), kRead);  // where ggml looks for devices first
  for (const char* path : {"/usr", "/lib", "/lib64", "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/loadavg",
                           "/proc/sys", "/sys/devices", "/sys/class/power_supply", "/dev/urandom", "/run/systemd/resolve",
                           "/run/resolvconf", "/run/NetworkManager"})
    rules.allow(path, kRead);
  rules.allow("/dev/null", kRead | kWriteFile);
  // Names are looked up by files here that other programs replace, so it is the folder that must be
  // allowed. What is secret in it only root may read; for root the files themselves are named.
  if (::geteuid() != 0) {
    rules.allow("/etc", kRead);
  } else {
    for (const char* path : {"/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf",
                             "/etc/services", "/etc/protocols", "/etc/localtime", "/etc/ld.so.cache", "/etc/ssl/certs",
                             "/etc/ssl/openssl.cnf", "/etc/pki", "/etc/ca-certificates", "/etc/vulkan", "/etc/OpenCL"})
      rules.allow(path, kRead);
  }
  for (const char* variable : {"SSL_CERT_FILE", "SSL_CERT_DIR", "OPENSSL_CONF"})
    if (const char* path = ::getenv(variable); path != nullptr && *path != '\0') rules.allow(path, kRead);
  if (needs.gpu) {
    for (const char* path : {"/sys", "/proc/driver", "/proc/devices", "/opt", "/run/opengl-driver"}) rules.allow(path, kRead);
    rules.allow("/dev/dri", kDevice);
    rules.allow("/dev/kfd", kDevice);
    for (const auto& entry : fs::directory_iterator("/dev", ignored))
      if (entry.path().filename().string().starts_with("nvidia")) rules.allow(entry.path(), kDevice);
  }
  if (const int error = rules.enforce(); error != 0) return std::string(::strerror(error));
  return std::nullopt;
}

}  // namespace kvasir::confine
