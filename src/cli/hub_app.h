// The hub's command line, once for `kvasir-hub` and once for `kvasir hub`.
#pragma once

namespace CLI {
class App;
}

namespace kvasir::cli {

// Adds options and subcommands to `app`; what runs puts its exit status into `exit_code`.
void configure_hub(CLI::App& app, int& exit_code);

}  // namespace kvasir::cli
