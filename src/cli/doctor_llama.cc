#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <format>
#include <fstream>
#include <string_view>

#include "cli/child_process.h"
#include "cli/demo_fleet.h"
#include "cli/doctor.h"

namespace kvasir::cli {
namespace {

constexpr auto kPatience = std::chrono::seconds(30);
constexpr std::string_view kOurs = "kvasir: ";

struct Output {
  std::string out, err;
};

Result<Output> run_llama(const std::filesystem::path& program, const std::string& argument,
                         const std::map<std::string, std::string>& environment) {
  KVASIR_ASSIGN(const TemporaryFolder folder, TemporaryFolder::make("kvasir-doctor"));
  boost::asio::io_context io;
  ChildProcess child(io);
  const std::filesystem::path log = folder.path() / "log";
  KVASIR_TRY(child.start({.executable = program, .args = {argument}, .environment = environment, .log = log}));
  Output output;
  while (const Result<std::string> line = child.read_line(kPatience)) output.out += *line + "\n";
  KVASIR_ASSIGN(const int status, child.wait(kPatience));
  if (status != 0) return fatal(std::format("{} {} failed; {}", program.string(), argument, child.last_words()));
  std::ifstream in(log);
  output.err.assign(std::istreambuf_iterator<char>(in), {});
  return output;
}

// What the plugin itself said, without its prefix.
std::string our_words(const std::string& text) {
  const std::size_t begin = text.find(kOurs);
  if (begin == std::string::npos) return "it gave no reason";
  return text.substr(begin + kOurs.size(), text.find('\n', begin) - begin - kOurs.size());
}

// The settings a backbone started from this shell would have.
std::map<std::string, std::string> plugin_settings() {
  std::map<std::string, std::string> out;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    if (text.starts_with("KVASIR_") && equals != std::string_view::npos)
      out.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  out.erase("KVASIR_STATS_FILE");  // a running server may be writing it
  return out;
}

std::string first_version_line(const Output& output) {
  const std::string all = output.out + output.err;
  const std::size_t begin = all.find("version: ");
  return begin == std::string::npos ? "of an unknown version" : all.substr(begin, all.find('\n', begin) - begin);
}

}  // namespace

void examine_llama(Findings& findings) {
  const auto program = find_program("llama-server", "llama.cpp-tools");
  if (!program) {
    findings.push_back({Grade::kNote, "llama.cpp", program.error().message + " A machine that is only a worker needs none."});
    return;
  }
  const Result<Output> version = run_llama(*program, "--version", {});
  if (!version) {
    findings.push_back({Grade::kBad, "llama.cpp", version.error().message});
    return;
  }
  findings.push_back({Grade::kGood, "llama.cpp", std::format("{}, {}.", program->string(), first_version_line(*version))});

  const auto plugin = find_plugin();
  if (!plugin) {
    findings.push_back({Grade::kNote, "plugin", plugin.error().message + " A machine that is only a worker needs none."});
    return;
  }
  std::map<std::string, std::string> settings = plugin_settings();
  settings["GGML_BACKEND_PATH"] = plugin->string();
  const Result<Output> devices = run_llama(*program, "--list-devices", settings);
  if (!devices) findings.push_back({Grade::kBad, "plugin", devices.error().message});
  else if ((devices->out + devices->err).contains("KVASIR0"))
    findings.push_back({Grade::kGood, "plugin", std::format("{} loads into this llama.cpp.", plugin->string())});
  else
    findings.push_back({Grade::kBad, "plugin",
                        std::format("{} does not load into this llama.cpp: {}", plugin->string(), our_words(devices->err + devices->out))});
}

}  // namespace kvasir::cli
