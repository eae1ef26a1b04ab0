// The commands of `kvasir`. Each lives in cmd_NAME.cc, adds itself as a subcommand, and puts
// its exit status into `exit_code` when it is the one that runs. To add one: declare it here,
// call it in main.cc, list its file in CMakeLists.txt.
#pragma once

namespace CLI {
class App;
}

namespace kvasir::cli {

void add_slice(CLI::App& app, int& exit_code);
void add_inspect(CLI::App& app, int& exit_code);
void add_synth(CLI::App& app, int& exit_code);

}  // namespace kvasir::cli
