#include "discovery/announcer.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <format>

#include "base/clock.h"
#include "discovery/multicast.h"

namespace kvasir::discovery {
namespace {

constexpr Nanos kGoodbyeMax = std::chrono::seconds(2);
constexpr std::size_t kLineBytesMax = 4096;

// Ends when the pipe does: its other end is the parent's alone.
bool parent_lives(int pipe) {
  pollfd wait{.fd = pipe, .events = POLLIN, .revents = 0};
  char scrap = 0;
  return ::poll(&wait, 1, 0) == 0 || (wait.revents & POLLIN && ::read(pipe, &scrap, 1) > 0);
}

[[noreturn]] void run_child(int pipe) {
  // Of the parent's streams it must keep none open, and of its signals those that end it.
  if (const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC); null >= 0)
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(null, fd);
  for (const int ignored : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) ::signal(ignored, SIG_IGN);
  std::string line;
  std::array<char, 512> bytes;
  while (!line.ends_with('\n') && line.size() < kLineBytesMax) {
    const ssize_t n = ::read(pipe, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) ::_exit(0);  // nothing was to be announced
    line.append(bytes.data(), static_cast<std::size_t>(n));
  }
  const auto service = from_line(line);
  if (!service) ::_exit(1);
  const Status done = announce(*service, [pipe] { return parent_lives(pipe); });
  ::_exit(done ? 0 : 1);
}

}  // namespace

Result<std::unique_ptr<Announcer>> Announcer::make() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return fatal(std::format("no pipe can be made: {}.", errno_text(errno)));
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[1]);
    run_child(ends[0]);
  }
  ::close(ends[0]);
  if (child < 0) {
    ::close(ends[1]);
    return fatal(std::format("no process can be made: {}.", errno_text(errno)));
  }
  return std::unique_ptr<Announcer>(new Announcer(child, ends[1]));
}

Announcer::~Announcer() {
  ::close(pipe_);
  for (const TimePoint end = monotonic_now() + kGoodbyeMax; monotonic_now() < end; ::usleep(10'000))
    if (::waitpid(child_, nullptr, WNOHANG) != 0) return;
  ::kill(child_, SIGKILL);
  ::waitpid(child_, nullptr, 0);
}

void Announcer::announce(const Service& service) {
  const std::string line = to_line(service);
  // The child may have ended: then nobody is told, and nothing else changes.
  (void)!::write(pipe_, line.data(), line.size());
}

}  // namespace kvasir::discovery
