// kvasir hub: the same as kvasir-hub.

#include <CLI/CLI.hpp>

#include "cli/commands.h"
#include "cli/hub_app.h"

namespace kvasir::cli {

void add_hub(CLI::App& app, int& exit_code) {
  configure_hub(*app.add_subcommand("hub", "Run the hub: slices, tokens and the coverage market over HTTP"), exit_code);
}

}  // namespace kvasir::cli
