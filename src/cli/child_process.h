// A child process that cannot outlive its owner: killed and reaped by the destructor, and by
// the kernel should this process die first. Standard input is /dev/null.
//
// One thread: the one that started the child (the kernel ties the child's death to it).
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/readable_pipe.hpp>
#include <boost/process/v2/process.hpp>
#include <chrono>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"

namespace kvasir::cli {

struct ChildOptions {
  std::filesystem::path executable;
  std::vector<std::string> args;
  // Added to this process's environment, from which KVASIR_, GGML_ and LLAMA_ variables are
  // taken out: the child gets these settings and no others.
  std::map<std::string, std::string> environment;
  std::filesystem::path log;  // its standard error
};

class ChildProcess {
 public:
  explicit ChildProcess(boost::asio::io_context& io) : io_(io), process_(io.get_executor()), stdout_(io) {}
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  Status start(const ChildOptions& options);
  bool running();
  pid_t pid() const { return process_.id(); }
  void kill();
  // The next line of its standard output, without the newline.
  Result<std::string> read_line(std::chrono::milliseconds timeout);
  // Waits for it to end by itself; the exit status.
  Result<int> wait(std::chrono::milliseconds timeout);
  // SIGTERM, and SIGKILL after `grace`; reaped when it returns.
  void stop(std::chrono::milliseconds grace);
  // For an error: how it ended and the last lines it logged.
  std::string last_words();

 private:
  std::string name() const { return options_.executable.filename().string(); }

  boost::asio::io_context& io_;
  boost::process::v2::process process_;
  boost::asio::readable_pipe stdout_;
  std::string unread_;  // of stdout
  ChildOptions options_;
};

// The executable `name` on PATH; the error says which package has it.
Result<std::filesystem::path> find_program(const std::string& name, const std::string& package);

}  // namespace kvasir::cli
