// Seccomp: what a server with threads and files calls, and nothing else. Whatever is not in the list does
// not exist (ENOSYS), which the C library has ways around where it tries something newer.

#include <asm/ioctls.h>
#include <asm/termbits.h>
#include <errno.h>
#include <sched.h>
#include <seccomp.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <format>
#include <memory>

#include "confine/confine.h"

namespace kvasir::confine {
namespace {

constexpr const char* kAllowed[] = {
    // bytes
    "read", "write", "readv", "writev", "pread64", "pwrite64", "preadv", "pwritev", "preadv2", "pwritev2", "sendfile",
    "splice", "copy_file_range", "lseek", "close", "close_range", "dup", "dup2", "dup3", "fcntl", "pipe", "pipe2",
    // files; which ones is for landlock to say
    "open", "openat", "openat2", "stat", "fstat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2",
    "readlink", "readlinkat", "getdents64", "getcwd", "statfs", "fstatfs", "rename", "renameat", "renameat2", "unlink",
    "unlinkat", "mkdir", "mkdirat", "rmdir", "link", "linkat", "chmod", "fchmod", "fchmodat", "fchmodat2", "fchown",
    "utimensat", "umask", "ftruncate", "truncate", "fallocate", "fadvise64", "fsync", "fdatasync", "sync_file_range", "flock",
    // memory
    "brk", "mmap", "munmap", "mremap", "mprotect", "madvise", "msync", "mlock", "mlock2", "munlock", "mincore", "membarrier",
    "memfd_create", "mbind", "get_mempolicy", "set_mempolicy",
    // threads and time
    "futex", "futex_waitv", "futex_wait", "futex_wake", "futex_requeue", "set_robust_list", "get_robust_list", "rseq",
    "set_tid_address", "exit", "exit_group", "sched_yield", "sched_getaffinity", "sched_setaffinity", "sched_getparam",
    "sched_setparam", "sched_getscheduler", "sched_setscheduler", "sched_getattr", "sched_setattr", "sched_get_priority_max",
    "sched_get_priority_min", "getpriority", "setpriority", "getcpu", "nanosleep", "clock_nanosleep", "clock_gettime",
    "clock_getres", "gettimeofday", "time", "times", "restart_syscall", "timerfd_create", "timerfd_settime", "timerfd_gettime",
    // signals to itself
    "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "rt_sigtimedwait", "rt_sigpending", "rt_sigsuspend", "sigaltstack",
    "wait4",
    // itself
    "getpid", "gettid", "getppid", "getuid", "geteuid", "getgid", "getegid", "getrusage", "getrlimit", "setrlimit",
    "prlimit64", "getrandom", "uname", "sysinfo", "arch_prctl",
    // sockets and waiting
    "socketpair", "bind", "listen", "accept", "accept4", "connect", "getsockname", "getpeername", "getsockopt", "setsockopt",
    "sendto", "recvfrom", "sendmsg", "recvmsg", "sendmmsg", "recvmmsg", "shutdown", "poll", "ppoll", "select", "pselect6",
    "epoll_create", "epoll_create1", "epoll_ctl", "epoll_wait", "epoll_pwait", "epoll_pwait2", "eventfd", "eventfd2"};

constexpr const char* kOfDrivers[] = {"kcmp", "getdents", "inotify_init1", "inotify_add_watch", "inotify_rm_watch"};

// Of sockets, pipes and terminals; nothing that puts words into a terminal's input.
constexpr unsigned long kControls[] = {FIONBIO, FIONREAD, FIOCLEX, FIONCLEX, TCGETS, TCGETS2, TIOCGWINSZ};

// Names of threads and of memory; nothing that takes back what is given up here.
constexpr unsigned long kProcessControls[] = {PR_SET_NAME, PR_GET_NAME, PR_SET_VMA, PR_GET_DUMPABLE, PR_GET_SECCOMP, PR_GET_NO_NEW_PRIVS};

constexpr int kFamilies[] = {AF_UNIX, AF_INET, AF_INET6, AF_NETLINK};

// What libseccomp's SCMP_A0… make, with every field named: clang's builds warn of those left out.
constexpr scmp_arg_cmp argument(unsigned n, scmp_compare op, scmp_datum_t a, scmp_datum_t b = 0) { return {n, op, a, b}; }

}  // namespace

std::optional<std::string> confine_system_calls(bool gpu, pid_t child) {
  const std::unique_ptr<void, decltype(&::seccomp_release)> filter(::seccomp_init(SCMP_ACT_ERRNO(ENOSYS)), &::seccomp_release);
  if (!filter) return "libseccomp cannot make a filter";
  int error = 0;
  const auto add = [&](const char* name, const auto&... conditions) {
    const int number = ::seccomp_syscall_resolve_name(name);
    if (number == __NR_SCMP_ERROR) return;  // newer than the library
    const int added = ::seccomp_rule_add(filter.get(), SCMP_ACT_ALLOW, number, sizeof...(conditions), conditions...);
    if (added != 0 && added != -EDOM && error == 0) error = added;  // -EDOM: not on this machine
  };
  for (const char* name : kAllowed) add(name);
  if (gpu)
    for (const char* name : kOfDrivers) add(name);
  if (gpu) add("ioctl", argument(1, SCMP_CMP_NE, TIOCSTI));
  else
    for (const unsigned long control : kControls) add("ioctl", argument(1, SCMP_CMP_EQ, control));
  for (const unsigned long control : kProcessControls) add("prctl", argument(0, SCMP_CMP_EQ, control));
  for (const int family : kFamilies) add("socket", argument(0, SCMP_CMP_EQ, static_cast<scmp_datum_t>(family)));
  // Threads, but no processes. The C library takes this where it finds no clone3.
  add("clone", argument(0, SCMP_CMP_MASKED_EQ, CLONE_THREAD, CLONE_THREAD));
  add("tgkill", argument(0, SCMP_CMP_EQ, static_cast<scmp_datum_t>(::getpid())));
  if (child > 0) add("kill", argument(0, SCMP_CMP_EQ, static_cast<scmp_datum_t>(child)));
  if (error != 0) return std::string(::strerror(-error));
  if (::prctl(PR_GET_SECCOMP, 0, 0, 0, 0) < 0) return "this kernel has no seccomp";
  if (const int loaded = ::seccomp_load(filter.get()); loaded != 0) return std::string(::strerror(-loaded));
  return std::nullopt;
}

}  // namespace kvasir::confine
