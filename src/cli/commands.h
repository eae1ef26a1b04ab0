// The commands of `kvasir`. Each lives in cmd_NAME.cc, adds itself as a subcommand, and puts
// its exit status into `exit_code` when it is the one that runs. To add one: declare it here,
// call it in main.cc, list its file in CMakeLists.txt.
#pragma once

#include <optional>

namespace CLI {
class App;
}

namespace kvasir::cli {

void add_slice(CLI::App& app, int& exit_code);
void add_inspect(CLI::App& app, int& exit_code);
void add_synth(CLI::App& app, int& exit_code);
void add_worker(CLI::App& app, int& exit_code);
void add_demo(CLI::App& app, int& exit_code);
void add_hub(CLI::App& app, int& exit_code);
void add_join(CLI::App& app, int& exit_code);
void add_run(CLI::App& app, int& exit_code);
void add_top(CLI::App& app, int& exit_code);
void add_verify(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app, int& exit_code);
void add_plan(CLI::App& app, int& exit_code);
void add_doctor(CLI::App& app, int& exit_code);
void add_find(CLI::App& app, int& exit_code);
void add_describe(CLI::App& app, int& exit_code);

// The whole program under the name linkcpp-expert-worker (a link to kvasir); nullopt under
// any other.
std::optional<int> run_older_name(int argc, char** argv);

}  // namespace kvasir::cli
