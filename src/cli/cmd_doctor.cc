// kvasir doctor: is everything right here, and what holds a running server up.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/doctor.h"
#include "discovery/service.h"
#include "ggml.h"

namespace kvasir::cli {
namespace {

struct Options {
  std::string workers, hub, ca_file, stats_file;
  double seconds = 3;
  bool json = false, no_discovery = false;
};

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

const char* word(Grade grade) { return grade == Grade::kGood ? "good" : grade == Grade::kNote ? "note" : "bad"; }

Result<Findings> examine(const Options& options) {
  Findings findings;
  if (!options.stats_file.empty()) {
    KVASIR_TRY(examine_server(options.stats_file, std::chrono::milliseconds(static_cast<int>(options.seconds * 1000)), findings));
    return findings;
  }
  if (!options.no_discovery && discovery::is_enabled()) examine_lan(findings);
  examine_llama(findings);  // with the caller's settings, which the rest must not follow
  ::unsetenv("GGML_BACKEND_PATH");
  ggml_log_set([](ggml_log_level level, const char* text, void*) { if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr); }, nullptr);
  examine_machine(findings);
  const std::string workers = options.workers.empty() ? variable("KVASIR_WORKERS") : options.workers;
  if (!workers.empty()) KVASIR_TRY(examine_workers(workers, variable("KVASIR_TOKEN"), variable("KVASIR_NUMERICS") == "fast", findings));
  const std::string hub = options.hub.empty() ? variable("KVASIR_HUB") : options.hub;
  if (!hub.empty()) examine_hub(hub, options.ca_file, findings);
  return findings;
}

int run(const Options& options) {
  const Result<Findings> findings = examine(options);
  if (!findings) return report(findings.error());
  bool bad = false;
  for (const Finding& f : *findings) {
    bad = bad || f.grade == Grade::kBad;
    if (options.json)
      std::printf("%s\n", nlohmann::ordered_json{{"grade", word(f.grade)}, {"subject", f.subject}, {"finding", f.sentence}}
                              .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
    else
      std::printf("%-5s %s: %s\n", word(f.grade), f.subject.c_str(), f.sentence.c_str());
  }
  return bad ? kExitFailed : kExitOk;
}

}  // namespace

void add_doctor(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("doctor", "Say whether this machine, llama.cpp, the plugin and the network are right, or why a server is slow");
  command->add_option("--workers", options->workers, "host:port[#fingerprint],… to try (default: KVASIR_WORKERS; token: KVASIR_TOKEN)");
  command->add_option("--hub", options->hub, "https://HOST of a hub to try (default: KVASIR_HUB)");
  command->add_option("--ca-file", options->ca_file, "PEM certificate of a hub that signed its own");
  command->add_option("--stats", options->stats_file, "a running server's KVASIR_STATS_FILE: look at that server and nothing else");
  command->add_option("--seconds", options->seconds, "how long to watch that server")->check(CLI::Range(0.5, 600.0))->capture_default_str();
  command->add_flag("--no-discovery", options->no_discovery, "do not ask who is on the local network (mDNS)");
  command->add_flag("--json", options->json, "one JSON object a line");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace kvasir::cli
