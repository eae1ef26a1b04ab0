// kvasir: one executable, one subcommand a job.

#include <CLI/CLI.hpp>
#include <csignal>

#include "cli/commands.h"

int main(int argc, char** argv) {
  // A file-size limit is an error to report (EFBIG), not a reason to die half-way.
  std::signal(SIGXFSZ, SIG_IGN);

  if (const auto status = kvasir::cli::run_older_name(argc, argv)) return *status;

  CLI::App app{"Kvasir runs a Mixture-of-Experts model over several machines, one expert at a time."};
  app.set_version_flag("--version", KVASIR_VERSION);
  app.require_subcommand(1);
  int exit_code = 0;
  kvasir::cli::add_slice(app, exit_code);
  kvasir::cli::add_inspect(app, exit_code);
  kvasir::cli::add_synth(app, exit_code);
  kvasir::cli::add_worker(app, exit_code);
  kvasir::cli::add_demo(app, exit_code);
  kvasir::cli::add_hub(app, exit_code);
  kvasir::cli::add_join(app, exit_code);
  kvasir::cli::add_run(app, exit_code);
  kvasir::cli::add_top(app, exit_code);
  kvasir::cli::add_verify(app, exit_code);
  kvasir::cli::add_bench(app, exit_code);
  kvasir::cli::add_plan(app, exit_code);
  kvasir::cli::add_doctor(app, exit_code);
  kvasir::cli::add_find(app, exit_code);
  kvasir::cli::add_describe(app, exit_code);

  CLI11_PARSE(app, argc, argv);
  return exit_code;
}
