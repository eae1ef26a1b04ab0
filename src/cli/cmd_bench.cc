// kvasir bench: figures and ratios for people; nothing is judged.

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <memory>

#include "cli/bench_dispatch.h"
#include "cli/bench_e2e.h"
#include "cli/bench_worker.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "ffn/device.h"

namespace kvasir::cli {
namespace {

void add_bench_worker(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<BenchWorkerOptions>();
  CLI::App* command = bench.add_subcommand("worker", "A worker's engine against naive ggml, batch by batch");
  auto* slice = command->add_option("--slice", options->slice, "slice or model to take the first layer of");
  command->add_flag("--synthetic", "a layer made on the spot (the default)")->excludes(slice);
  command->add_option("--experts", options->n_expert, "experts of the synthetic layer")->capture_default_str();
  command->add_option("--n-embd", options->n_embd, "its width")->capture_default_str();
  command->add_option("--n-ff", options->n_ff, "its experts' inner width")->capture_default_str();
  command->add_option("--types", options->types, "its tensor types")->capture_default_str();
  command->add_option("--top-k", options->n_used, "experts used for a token")->check(CLI::Range(1, 1024))->capture_default_str();
  command->add_option("--batch", options->batches, "tokens in a batch, one or more (default: 1 2 4 … 512)")->check(CLI::Range(1, 16384))->delimiter(',');
  command->add_option("--threads", options->n_threads, "threads of both sides (default: one a core)")->check(CLI::Range(1, ffn::kThreadsMax));
  command->add_option("--copies", options->copies, "copies of the weights that class fast may have")->check(CLI::Range(1, 2))->capture_default_str();
  command->add_option("--numerics", options->numerics, "fast (the tuned plans) or exact")->check(CLI::IsMember({"fast", "exact"}))->capture_default_str();
  command->add_option("--pairs", options->pairs, "alternating pairs to take the median of")->check(CLI::Range(1, 1000))->capture_default_str();
  command->add_flag("--json", options->json, "one object a line");
  command->add_option("--plot", options->plot, "also draw an SVG into this file");
  command->callback([options, &exit_code] {
    ::unsetenv("GGML_BACKEND_PATH");
    ggml_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    exit_code = report(bench_worker(*options));
  });
}

void add_bench_dispatch(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<BenchDispatchOptions>();
  CLI::App* command =
      bench.add_subcommand("dispatch", "A layer's round without compute beside an echo of the same bytes, plain, TLS");
  command->add_option("--gap-ms", options->gaps_ms, "idleness before each round, as of a backbone that decodes")
      ->check(CLI::Range(0.0, 1000.0))
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--n-embd", options->n_embd, "width of a row")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  command->add_option("--top-k", options->top_k, "experts used for the row")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  command->add_option("--spin-us", options->spin_us, "look for the answer this long before sleeping")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  command->add_option("--rounds", options->rounds, "rounds of each line (default: 4000 without a gap, 400 with one)")
      ->check(CLI::Range(1, 1'000'000));
  command->add_flag("--json", options->json, "one object a line");
  command->callback([options, &exit_code] { exit_code = report(bench_dispatch(*options)); });
}

void add_bench_e2e(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<BenchE2eOptions>();
  CLI::App* command = bench.add_subcommand("e2e", "A whole model by llama-bench: stock, llama.cpp's RPC, and over workers, in turn");
  command->add_option("--model", options->model, "model to run, e.g. one of `kvasir synth`")->required();
  command->add_option("--sides", options->sides, "stock, no-repack, rpc, exact, fast; ratios are to the first")
      ->check(CLI::IsMember({"stock", "no-repack", "rpc", "exact", "fast"}))
      ->delimiter(',');
  command->add_option("--workers", options->n_workers, "workers of each class, every one with all experts")->check(CLI::Range(1, 16))->capture_default_str();
  command->add_option("--threads", options->n_threads, "threads of every process")->check(CLI::Range(1, ffn::kThreadsMax))->capture_default_str();
  command->add_option("--prompt", options->n_prompt, "tokens of the prompt")->check(CLI::Range(1, 16384))->capture_default_str();
  command->add_option("--decode", options->n_decode, "tokens to decode")->check(CLI::Range(1, 16384))->capture_default_str();
  command->add_option("--runs", options->runs, "runs of each side")->check(CLI::Range(1, 100))->capture_default_str();
  command->add_flag("--json", options->json, "one object a line");
  command->callback([options, &exit_code] { exit_code = report(bench_e2e(*options)); });
}

}  // namespace

void add_bench(CLI::App& app, int& exit_code) {
  CLI::App* bench = app.add_subcommand("bench", "Measure this machine: figures and ratios, nothing is judged");
  bench->require_subcommand(1);
  add_bench_worker(*bench, exit_code);
  add_bench_dispatch(*bench, exit_code);
  add_bench_e2e(*bench, exit_code);
}

}  // namespace kvasir::cli
