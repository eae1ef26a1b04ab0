// kvasir run: llama-server with the plugin, as one command.

#include <curl/curl.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <format>
#include <memory>

#include "cli/child_process.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/demo_fleet.h"
#include "cli/run_settings.h"

namespace kvasir::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::array kForwarded{SIGINT, SIGTERM, SIGHUP, SIGQUIT};
constexpr auto kLookEvery = std::chrono::milliseconds(200);
constexpr long kProbeTimeoutMs = 1000;
constexpr int kExitSignalBase = 128;  // as a shell reports it
constexpr int kExitNoStart = 127;

std::size_t ignore_bytes(char*, std::size_t size, std::size_t count, void*) { return size * count; }

// Whether llama-server has loaded the model and answers.
bool is_ready(const RunSettings& settings) {
  const std::unique_ptr<CURL, decltype(&curl_easy_cleanup)> curl(curl_easy_init(), &curl_easy_cleanup);
  if (!curl) return false;
  std::string host = settings.listen.host;
  if (host == "0.0.0.0" || host == "::") host = "localhost";
  const std::string where = settings.socket.empty() ? net::format_host_port({host, settings.listen.port}) : "localhost";
  const std::string url = std::format("{}://{}{}/health", settings.scheme, where, settings.prefix);
  curl_easy_setopt(curl.get(), CURLOPT_URL, url.c_str());
  if (!settings.socket.empty()) curl_easy_setopt(curl.get(), CURLOPT_UNIX_SOCKET_PATH, settings.socket.c_str());
  curl_easy_setopt(curl.get(), CURLOPT_PROXY, "");
  curl_easy_setopt(curl.get(), CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(curl.get(), CURLOPT_TIMEOUT_MS, kProbeTimeoutMs);
  // Our own child on this machine; nothing secret is sent to it.
  curl_easy_setopt(curl.get(), CURLOPT_SSL_VERIFYPEER, 0L);
  curl_easy_setopt(curl.get(), CURLOPT_SSL_VERIFYHOST, 0L);
  curl_easy_setopt(curl.get(), CURLOPT_WRITEFUNCTION, ignore_bytes);
  long status = 0;
  if (curl_easy_perform(curl.get()) == CURLE_OK) curl_easy_getinfo(curl.get(), CURLINFO_RESPONSE_CODE, &status);
  return status == 200;
}

// In a process group of its own: Ctrl-C comes to us alone, and the child hears it once.
Result<pid_t> start(const fs::path& program, const RunSettings& settings, const sigset_t& child_signals) {
  std::vector<char*> argv;
  std::vector<std::string> words = {program.string()};
  words.insert(words.end(), settings.args.begin(), settings.args.end());
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  for (const std::string& name : settings.unset) ::unsetenv(name.c_str());
  for (const auto& [name, value] : settings.environment) ::setenv(name.c_str(), value.c_str(), 1);
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) return fatal(std::format("cannot start llama-server: {}.", errno_text(errno)));
  if (child > 0) return child;
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(kExitNoStart);
  if (const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC); null >= 0) ::dup2(null, STDIN_FILENO);
  ::pthread_sigmask(SIG_SETMASK, &child_signals, nullptr);
  ::execv(program.c_str(), argv.data());
  ::_exit(kExitNoStart);
}

std::string url_of(const RunSettings& settings) {
  if (!settings.socket.empty()) return "unix:" + settings.socket;
  return std::format("{}://{}{}", settings.scheme, net::format_host_port(settings.listen), settings.prefix);
}

// Until the child ends: hands signals on, and says when it is up. Its exit status.
int attend(pid_t child, const RunSettings& settings, const fs::path& plugin_sign, const sigset_t& signals) {
  bool up = false, refused = false;
  while (true) {
    int status = 0;
    if (::waitpid(child, &status, WNOHANG) == child) {
      if (refused) return kExitFailed;
      if (WIFSIGNALED(status)) return kExitSignalBase + WTERMSIG(status);
      if (!up && WEXITSTATUS(status) == kExitNoStart) std::fprintf(stderr, "llama-server could not be started.\n");
      return WEXITSTATUS(status);
    }
    if (!up && !refused && is_ready(settings)) {
      up = true;
      if (fs::exists(plugin_sign)) {
        std::printf("%s\n", url_of(settings).c_str());
        std::fflush(stdout);
      } else {
        // llama.cpp goes on without a plugin that does not load; that is not what was asked for.
        std::fprintf(stderr, "llama-server runs without Kvasir's plugin, whose reason is among the lines above; it is stopped.\n");
        refused = true;
        ::kill(child, SIGTERM);
      }
    }
    const timespec wait{.tv_sec = 0, .tv_nsec = std::chrono::nanoseconds(kLookEvery).count()};
    const int signal = ::sigtimedwait(&signals, nullptr, &wait);
    if (signal > 0 && signal != SIGCHLD) ::kill(child, signal);
  }
}

Result<int> run(const RunOptions& options) {
  KVASIR_ASSIGN(const fs::path program, find_program("llama-server", "llama.cpp-tools"));
  KVASIR_ASSIGN(const fs::path plugin, find_plugin());
  KVASIR_ASSIGN(RunSettings settings, decide_run(options));
  settings.environment["GGML_BACKEND_PATH"] = plugin.string();
  if (options.show) {
    for (const auto& [name, value] : settings.environment)
      std::printf("%s=%s ", name.c_str(), name == "KVASIR_TOKEN" ? "…" : value.c_str());
    std::printf("llama-server");
    for (const std::string& arg : settings.args) std::printf(" %s", arg.c_str());
    std::printf("\n");
    return kExitOk;
  }
  for (const std::string& note : settings.notes) std::fprintf(stderr, "kvasir: %s\n", note.c_str());
  // The plugin writes its counters here from the moment it is loaded.
  KVASIR_ASSIGN(const TemporaryFolder folder, TemporaryFolder::make("kvasir-run"));
  const char* counters = std::getenv("KVASIR_STATS_FILE");
  const fs::path sign = counters != nullptr && *counters != '\0' ? fs::path(counters) : folder.path() / "counters.json";
  settings.environment["KVASIR_STATS_FILE"] = sign.string();
  std::error_code ignored;
  fs::remove(sign, ignored);

  sigset_t signals, before;
  sigemptyset(&signals);
  sigaddset(&signals, SIGCHLD);
  for (const int signal : kForwarded) sigaddset(&signals, signal);
  ::pthread_sigmask(SIG_BLOCK, &signals, &before);
  KVASIR_ASSIGN(const pid_t child, start(program, settings, before));
  const int status = attend(child, settings, sign, signals);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return status;
}

}  // namespace

void add_run(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* command = app.add_subcommand("run", "Start llama-server with its experts on a hub's workers, or on those you name");
  command->add_option("model", options->model, "GGUF file of the model")->required();
  command->add_option("--hub", options->hub,
                      "https://HOST of the hub (or KVASIR_HUB); with neither, nor workers, the one of this network whose "
                      "certificate --ca-file has");
  command->add_option("--token", options->token, "backbone token; better in --token-file or KVASIR_TOKEN, where others cannot see it");
  command->add_option("--token-file", options->token_file, "file with the backbone token");
  command->add_option("--ca-file", options->ca_file, "PEM certificate of a hub that signed its own");
  command->add_option("--workers", options->workers, "LINK,LINK,… as workers print them, instead of a hub (or KVASIR_WORKERS)");
  command->add_option("--listen", options->listen, "[HOST:]PORT of the OpenAI API (default: 127.0.0.1:8080)");
  command->add_option("--numerics", options->numerics, "numeric class: exact, invariant or fast (default: exact)");
  command->add_option("--local", options->local, "experts that no worker answers for: fallback, never or only (default: fallback)");
  command->add_option("--replica", options->replica, "where the experts for that lie: mmap, ram or none (default: mmap; none for a backbone file)");
  command->add_flag("--show", options->show, "print the command and its variables, and start nothing");
  command->add_option("flags", options->extra, "after --: flags for llama-server, which win over those chosen here");
  command->callback([options, &exit_code] {
    const Result<int> status = run(*options);
    exit_code = status ? *status : report(status.error());
  });
}

}  // namespace kvasir::cli
