#include "discovery/finder.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <format>
#include <string>

#include "discovery/multicast.h"

namespace kvasir::discovery {
namespace {

[[noreturn]] void run_child(int pipe, Nanos time) {
  const auto found = find(time);
  std::string text = found ? "" : "!" + found.error().message + "\n";
  if (found)
    for (const Service& service : *found) text += to_line(service);
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t n = ::write(pipe, text.data() + done, text.size() - done);
    if (n < 0 && errno != EINTR) ::_exit(1);
    if (n > 0) done += static_cast<std::size_t>(n);
  }
  ::_exit(0);
}

}  // namespace

Result<std::vector<Service>> find_services(Nanos time) {
  if (!is_enabled()) return fix_input("the local network is not asked (KVASIR_DISCOVERY=0).");
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return fatal(std::format("no pipe can be made: {}.", errno_text(errno)));
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    run_child(ends[1], time);
  }
  ::close(ends[1]);
  std::string text;
  std::array<char, 4096> bytes;
  for (ssize_t n = 1; child > 0 && n != 0;) {
    n = ::read(ends[0], bytes.data(), bytes.size());
    if (n < 0 && errno != EINTR) break;
    if (n > 0) text.append(bytes.data(), static_cast<std::size_t>(n));
  }
  ::close(ends[0]);
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child || status != 0)
    return retry_later("the local network could not be searched: the search ended before it was done.");
  if (text.starts_with('!')) return retry_later(text.substr(1, text.find('\n') - 1));
  std::vector<Service> out;
  for (std::size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    KVASIR_ASSIGN(Service service, from_line(std::string_view(text).substr(begin, end - begin)));
    out.push_back(std::move(service));
  }
  return out;
}

}  // namespace kvasir::discovery
