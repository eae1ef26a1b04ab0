// kvasir-hub: the hub alone.

#include <CLI/CLI.hpp>

#include "cli/hub_app.h"

int main(int argc, char** argv) {
  CLI::App app{"Hands out slices of models, keeps track of who serves which experts, and issues node tokens."};
  app.set_version_flag("--version", KVASIR_VERSION);
  int exit_code = 0;
  kvasir::cli::configure_hub(app, exit_code);
  CLI11_PARSE(app, argc, argv);
  return exit_code;
}
