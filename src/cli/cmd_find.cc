// kvasir find: the hubs and workers of the local network.

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/console.h"
#include "discovery/finder.h"

namespace kvasir::cli {
namespace {

struct Options {
  double seconds = std::chrono::duration<double>(discovery::kFindTime).count();
  bool json = false;
};

int run(const Options& options) {
  const auto found = discovery::find_services(std::chrono::milliseconds(static_cast<int>(options.seconds * 1000)));
  if (!found) return report(found.error());
  for (const discovery::Service& service : *found) {
    const char* kind = service.kind == discovery::Kind::kHub ? "hub" : "worker";
    if (options.json)
      std::printf("%s\n", nlohmann::ordered_json{{"kind", kind}, {"link", service.link()}, {"name", service.name},
                                                 {"version", service.value("version")}}.dump().c_str());
    else
      std::printf("%-6s %s  %s\n", kind, service.link().c_str(), service.name.c_str());
  }
  if (found->empty()) std::fprintf(stderr, "no hub and no worker announces itself on this network.\n");
  return kExitOk;
}

}  // namespace

void add_find(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("find", "List the hubs and workers that announce themselves on this network");
  command->add_option("--seconds", options->seconds, "how long to wait for answers")
      ->check(CLI::Range(0.5, 60.0))
      ->capture_default_str();
  command->add_flag("--json", options->json, "one JSON object a line");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace kvasir::cli
