// Each test confines a process of its own, for it cannot be undone.
#include "confine/confine.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <thread>

namespace kvasir::confine {
namespace {

namespace fs = std::filesystem;

// In a child: its exit status says which of its checks failed first, by line.
#define REQUIRE(condition) \
  if (!(condition)) ::_exit(__LINE__ % 250 + 1)

template <typename Body>
int in_a_child(Body&& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    body();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

bool can_read(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd >= 0) ::close(fd);
  return fd >= 0;
}
bool can_write(const fs::path& path) { return static_cast<bool>(std::ofstream(path) << "text" << std::flush); }

class ConfineTest : public testing::Test {
 protected:
  ConfineTest() {
    char name[] = "/tmp/kvasir-confine-XXXXXX";
    EXPECT_NE(::mkdtemp(name), nullptr);
    top_ = name;
    for (const char* folder : {"data", "models", "elsewhere"}) fs::create_directories(top_ / folder);
    for (const char* file : {"models/model", "elsewhere/secret", "token"}) EXPECT_TRUE(can_write(top_ / file));
  }
  ~ConfineTest() override { fs::remove_all(top_); }

  Needs needs() const { return {.read = {top_ / "models", top_ / "token", top_ / "absent"}, .write = {top_ / "data"}}; }

  fs::path top_;
};

TEST_F(ConfineTest, OnlyNamedFilesAreOpened) {
  const int failed = in_a_child([&] {
    REQUIRE(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    const auto why_not = confine_files(needs());
    if (why_not && why_not->contains("no landlock")) ::_exit(254);
    REQUIRE(!why_not);
    const fs::path data = top_ / "data";
    REQUIRE(can_read(top_ / "models/model") && can_read(top_ / "token"));
    REQUIRE(!can_write(top_ / "models/model") && !can_write(top_ / "models/new") && !can_write(top_ / "token"));
    REQUIRE(!can_read(top_ / "elsewhere/secret") && !can_write(top_ / "elsewhere/new"));
    REQUIRE(!can_write("/tmp/kvasir-confine-new") && !can_read("/etc/shadow") && !can_read("/proc/1/environ"));
    // What servers do in their folder: files written aside and renamed, folders, removal.
    std::error_code error;
    REQUIRE(fs::create_directories(data / "a/b", error) && can_write(data / "a/b/new"));
    fs::rename(data / "a/b/new", data / "a/file", error);
    REQUIRE(!error && can_read(data / "a/file"));
    REQUIRE(::truncate((data / "a/file").c_str(), 1) == 0);
    REQUIRE(fs::remove_all(data / "a", error) == 3);
    // No way out of it, nor into it.
    REQUIRE(::symlink((top_ / "elsewhere/secret").c_str(), (data / "link").c_str()) != 0);
    REQUIRE(::link((top_ / "elsewhere/secret").c_str(), (data / "link").c_str()) != 0);
    REQUIRE(::rename((top_ / "elsewhere/secret").c_str(), (data / "secret").c_str()) != 0);
    REQUIRE(::unlink((top_ / "elsewhere/secret").c_str()) != 0);
    REQUIRE(!can_read(data / ".." / "elsewhere/secret"));
    // What every program needs.
    for (const char* path : {"/etc/hosts", "/proc/self/stat", "/proc/meminfo", "/dev/urandom"}) REQUIRE(can_read(path));
    REQUIRE(can_write("/dev/null"));
    // And no program is started, whatever the folder.
    REQUIRE(::execl("/bin/true", "true", nullptr) != 0);
  });
  if (failed == 254) GTEST_SKIP() << "this kernel has no landlock";
  EXPECT_EQ(failed, 0) << "line " << failed - 1 << " (modulo 250)";
}

TEST_F(ConfineTest, AChildThatIsThereCanBeEnded) {
  const int failed = in_a_child([&] {
    const pid_t child = ::fork();
    if (child == 0) {
      ::pause();
      ::_exit(0);
    }
    Needs all = needs();
    all.child = child;
    REQUIRE(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    (void)confine_files(all);
    REQUIRE(!confine_system_calls(/*gpu=*/false, child));
    REQUIRE(::kill(::getppid(), 0) != 0);
    int status = 0;
    REQUIRE(::kill(child, SIGKILL) == 0 && ::waitpid(child, &status, 0) == child && WIFSIGNALED(status));
  });
  EXPECT_EQ(failed, 0) << "line " << failed - 1 << " (modulo 250)";
}

std::atomic<int> caught = 0;

TEST_F(ConfineTest, OnlyAServersSystemCallsExist) {
  const int failed = in_a_child([&] {
    REQUIRE(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    REQUIRE(!confine_system_calls(/*gpu=*/false));
    // Programs, processes, other people's processes.
    errno = 0;
    REQUIRE(::execl("/bin/true", "true", nullptr) != 0 && errno == ENOSYS);
    REQUIRE(::fork() < 0);
    REQUIRE(::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0);
    REQUIRE(::kill(::getppid(), 0) != 0);
    // The kernel's far corners.
    REQUIRE(::unshare(CLONE_NEWUSER) != 0);
    REQUIRE(::socket(AF_PACKET, SOCK_RAW, 0) < 0 && ::socket(AF_VSOCK, SOCK_STREAM, 0) < 0);
    REQUIRE(::chroot("/") != 0);
    const char c = 'x';
    errno = 0;
    REQUIRE(::ioctl(0, TIOCSTI, &c) != 0 && errno == ENOSYS);
    REQUIRE(::prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) != 0);
    // What it is for.
    bool ran = false;
    std::thread([&] { ran = true; }).join();
    REQUIRE(ran);
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(fd >= 0 && ::listen(fd, 1) == 0);
    ::signal(SIGUSR1, [](int) { ++caught; });
    REQUIRE(::raise(SIGUSR1) == 0 && caught == 1);
  });
  EXPECT_EQ(failed, 0) << "line " << failed - 1 << " (modulo 250)";
}

TEST_F(ConfineTest, DriversHaveTheirDevicesAndNoMore) {
  const int failed = in_a_child([&] {
    Needs all = needs();
    all.gpu = true;
    REQUIRE(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    (void)confine_files(all);
    REQUIRE(!confine_system_calls(/*gpu=*/true));
    const char c = 'x';
    errno = 0;
    REQUIRE(::ioctl(0, TIOCSTI, &c) != 0 && errno == ENOSYS);
    errno = 0;
    REQUIRE(::ioctl(-1, 0xc0106400ul, nullptr) != 0 && errno == EBADF);
    REQUIRE(::fork() < 0);
  });
  EXPECT_EQ(failed, 0) << "line " << failed - 1 << " (modulo 250)";
}

TEST_F(ConfineTest, NoDumpsNoPrivilegesAndALineThatSaysSo) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  EXPECT_EQ(confine({}), "not confined: built with a sanitizer");
#else
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const int failed = in_a_child([&] {
    const std::string said = confine(needs());
    REQUIRE(::write(pipe[1], said.data(), said.size()) == static_cast<ssize_t>(said.size()));
    rlimit cores{};
    REQUIRE(::getrlimit(RLIMIT_CORE, &cores) == 0 && cores.rlim_max == 0);
    REQUIRE(::prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) == 0);
    REQUIRE(::prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1);
    REQUIRE(::fork() < 0);
  });
  ::close(pipe[1]);
  char said[400] = {};
  EXPECT_GT(::read(pipe[0], said, sizeof said - 1), 0);
  ::close(pipe[0]);
  EXPECT_EQ(failed, 0) << "line " << failed - 1 << " (modulo 250)";
  const std::string line = said;
  EXPECT_TRUE(line.starts_with("confined: no core dumps, no new privileges, ")) << line;
  EXPECT_TRUE(line.ends_with("files, system calls") || line.contains("files (this kernel has no landlock)")) << line;
#endif
}

}  // namespace
}  // namespace kvasir::confine
