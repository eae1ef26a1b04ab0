#include "hub/store/postgres_server.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <format>
#include <thread>
#include <vector>

extern char** environ;

namespace kvasir::hub {
namespace {

namespace fs = std::filesystem;

Result<pid_t> spawn(const std::vector<std::string>& command, const fs::path& log) {
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  pid_t pid = -1;
  const int error = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return fatal(std::format("cannot run {}: {}.", command[0], errno_text(error)));
  return pid;
}

int wait_for(pid_t pid) {
  int status = 0;
  return ::waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class Server final : public PostgresServer {
 public:
  Server(fs::path folder, fs::path bin) : folder_(std::move(folder)), bin_(std::move(bin)) {
    url_ = std::format("postgresql:///postgres?host={}&user=postgres", folder_.string());
  }
  ~Server() override {
    stop(SIGQUIT);
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
    fs::remove(log(), ignored);
  }

  const std::string& url() const override { return url_; }

  Status make() {
    KVASIR_ASSIGN(
        const pid_t pid,
        spawn(as_postgres({bin_ / "initdb", "-D", data(), "-U", "postgres", "-A", "trust", "-N", "--no-locale"}),
              log()));
    if (wait_for(pid) != 0) return fatal(std::format("initdb failed; see '{}'.", log().string()));
    return run();
  }

  Status restart() override {
    stop(SIGQUIT);
    return run();
  }

 private:
  std::string data() const { return folder_ / "data"; }
  fs::path log() const { return folder_.string() + ".log"; }

  // The server refuses to run as root; its package has made a user for it.
  static std::vector<std::string> as_postgres(std::vector<std::string> command) {
    if (::geteuid() != 0) return command;
    std::vector<std::string> out = {"setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups",
                                    "--pdeathsig=INT"};
    out.insert(out.end(), command.begin(), command.end());
    return out;
  }

  Status run() {
    KVASIR_ASSIGN(pid_, spawn(as_postgres({bin_ / "postgres", "-D", data(), "-k", folder_, "-c",
                                           "listen_addresses=", "-c", "fsync=off"}),
                              log()));
    for (int i = 0; i < 300; ++i) {
      KVASIR_ASSIGN(const pid_t probe, spawn({bin_ / "pg_isready", "-q", "-h", folder_, "-U", "postgres"}, log()));
      if (wait_for(probe) == 0) return {};
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return fatal(std::format("the server does not answer; see '{}'.", log().string()));
  }

  void stop(int signal) {
    if (pid_ <= 0) return;
    ::kill(pid_, signal);
    wait_for(pid_);
    pid_ = -1;
  }

  fs::path folder_, bin_;
  std::string url_;
  pid_t pid_ = -1;
};

}  // namespace

Result<std::unique_ptr<PostgresServer>> PostgresServer::start() {
  fs::path bin;
  std::error_code error;
  for (const auto& version : fs::directory_iterator("/usr/lib/postgresql", error))
    if (fs::exists(version.path() / "bin" / "postgres")) bin = version.path() / "bin";
  if (bin.empty()) return fatal("the package postgresql is not installed.");
  char folder[] = "/tmp/kvasir-postgres-XXXXXX";
  if (::mkdtemp(folder) == nullptr) return fatal(std::format("cannot make a folder in /tmp: {}.", errno_text(errno)));
  // The server's user must be able to write there.
  fs::permissions(folder, fs::perms::all, error);
  auto server = std::make_unique<Server>(folder, bin);
  KVASIR_TRY(server->make());
  return server;
}

}  // namespace kvasir::hub
