#include "cli/child_process.h"

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/asio/read_until.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/process/v2/environment.hpp>
#include <boost/process/v2/stdio.hpp>
#include <deque>
#include <format>
#include <fstream>
#include <optional>
#include <string_view>

#include "cli/interrupt.h"

namespace kvasir::cli {
namespace {

namespace asio = boost::asio;
namespace bp = boost::process::v2;
using boost::system::error_code;

constexpr std::size_t kLineBytesMax = 64 * 1024;
constexpr std::size_t kLastWordsLines = 12;
constexpr auto kPollPeriod = std::chrono::milliseconds(10);
constexpr std::array<std::string_view, 3> kPrefixesTakenOut{"KVASIR_", "GGML_", "LLAMA_"};

// Runs in the child between fork and exec.
struct DieWithParent {
  pid_t parent = getpid();
  template <typename Launcher>
  error_code on_exec_setup(Launcher&, const boost::filesystem::path&, const char* const*&) const {
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return error_code(errno, boost::system::system_category());
    // The parent may be gone before the line above.
    if (getppid() != parent) return error_code(ESRCH, boost::system::system_category());
    return {};
  }
};

std::vector<std::string> child_environment(const std::map<std::string, std::string>& added) {
  std::vector<std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const auto taken_out = [&](std::string_view prefix) { return text.starts_with(prefix); };
    if (std::ranges::none_of(kPrefixesTakenOut, taken_out) && !added.contains(std::string(text.substr(0, text.find('=')))))
      out.emplace_back(text);
  }
  for (const auto& [name, value] : added) out.push_back(name + "=" + value);
  return out;
}

}  // namespace

ChildProcess::~ChildProcess() { kill(); }

Status ChildProcess::start(const ChildOptions& options) {
  options_ = options;
  try {
    const std::vector<std::string> environment = child_environment(options.environment);
    bp::process started(io_.get_executor(), boost::filesystem::path(options.executable.string()), options.args,
                        bp::process_environment(environment),
                        bp::process_stdio{nullptr, stdout_, boost::filesystem::path(options.log.string())}, DieWithParent{});
    process_ = std::move(started);
  } catch (const boost::system::system_error& error) {
    return fatal(std::format("cannot start '{}': {}.", options.executable.string(), error.code().message()));
  }
  return {};
}

bool ChildProcess::running() {
  error_code ignored;
  return process_.is_open() && process_.running(ignored);
}

void ChildProcess::kill() {
  error_code ignored;
  if (running()) process_.terminate(ignored);  // SIGKILL, and reaps it
}

Result<std::string> ChildProcess::read_line(std::chrono::milliseconds timeout) {
  error_code result;
  std::size_t n = 0;
  bool done = false, late = false;
  asio::steady_timer timer(io_, timeout);
  asio::async_read_until(stdout_, asio::dynamic_buffer(unread_, kLineBytesMax), '\n', [&](error_code error, std::size_t bytes) {
    result = error;
    n = bytes;
    done = true;
    timer.cancel();
  });
  timer.async_wait([&](error_code error) {
    if (error || done) return;
    late = true;
    stdout_.cancel();
  });
  io_.restart();
  while (!done) {
    io_.run_one_for(kPollPeriod);
    if (interrupted() && !late) {
      late = true;
      stdout_.cancel();
    }
  }
  io_.run();  // the timer's handler refers to this frame
  if (interrupted()) return fatal("interrupted.");
  if (late) return fatal(std::format("'{}' said nothing for {} s; {}", name(), timeout.count() / 1000, last_words()));
  if (result) return fatal(std::format("'{}' ended too early; {}", name(), last_words()));
  std::string line = unread_.substr(0, n - 1);
  unread_.erase(0, n);
  return line;
}

Result<int> ChildProcess::wait(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (running()) {
    if (interrupted()) return fatal("interrupted.");
    if (std::chrono::steady_clock::now() > deadline)
      return fatal(std::format("'{}' did not end within {} s; {}", name(), timeout.count() / 1000, last_words()));
    usleep(std::chrono::microseconds(kPollPeriod).count());
  }
  return process_.exit_code();
}

void ChildProcess::stop(std::chrono::milliseconds grace) {
  if (!running()) return;
  error_code ignored;
  process_.request_exit(ignored);
  const auto deadline = std::chrono::steady_clock::now() + grace;
  while (running() && std::chrono::steady_clock::now() < deadline) usleep(std::chrono::microseconds(kPollPeriod).count());
  kill();
}

std::string ChildProcess::last_words() {
  std::ifstream in(options_.log);
  std::deque<std::string> lines;
  for (std::string line; std::getline(in, line);) {
    lines.push_back(std::move(line));
    if (lines.size() > kLastWordsLines) lines.pop_front();
  }
  if (lines.empty()) return "it logged nothing.";
  std::string out = "its last lines were:";
  for (const std::string& line : lines) out += "\n  " + line;
  return out;
}

Result<std::filesystem::path> find_program(const std::string& name, const std::string& package) {
  const boost::filesystem::path found = bp::environment::find_executable(name);
  if (found.empty()) return fix_input(std::format("'{}' is not on PATH; install the package {}.", name, package));
  return std::filesystem::path(found.string());
}

}  // namespace kvasir::cli
