// kvasir demo: the whole system on one machine, compared with llama.cpp alone.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <format>
#include <memory>
#include <thread>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/demo_fleet.h"
#include "cli/demo_measure.h"
#include "cli/demo_run.h"
#include "cli/interrupt.h"
#include "gguf/synth.h"

namespace kvasir::cli {
namespace {

namespace fs = std::filesystem;

constexpr auto kQuantizeTimeout = std::chrono::minutes(10);
constexpr const char* kShippedModel = "tinymoe-en-Q4_K_M.gguf";

struct Options {
  std::string model;
  DemoRunOptions run;
  int n_prompts = 3;
  bool all = false;
  bool measure = false;
};

Result<fs::path> find_model(const std::string& given) {
  if (!given.empty()) return fs::path(given);
  KVASIR_ASSIGN(const fs::path self, own_executable());
  const fs::path prefix = self.parent_path().parent_path();
  // build/bin/kvasir of a source tree, then an installed one.
  for (const fs::path& place : {prefix.parent_path() / "models", prefix / "share" / "kvasir" / "models"})
    if (fs::exists(place / kShippedModel)) return place / kShippedModel;
  return fix_input(std::format("the model {} is not beside this program; name one with --model FILE.", kShippedModel));
}

std::string of(std::size_t n, std::size_t total) { return std::format("{}/{}", n, total); }

void print_heading(const gguf::MoeModel& model) {
  std::printf("\n%s: %s, %u layers, %u experts, top-%u\n", fs::path(model.file_name()).filename().c_str(),
              format_bytes(model.files().total_bytes()).c_str(), model.n_layer(), model.n_expert(), model.n_expert_used());
}

void print_fleet(const DemoFleet& fleet) {
  int number = 0;
  for (const DemoFleet::Member& member : fleet.members())
    std::printf("  worker %d  %-21s  %3llu experts, %s\n", ++number, member.link.c_str(),
                static_cast<unsigned long long>(member.n_experts), format_bytes(member.bytes).c_str());
  std::fflush(stdout);
}

// One line a variant: how many tokens of each prompt are the reference's, and what it cost.
void print_row(const char* name, const DemoRun& run, const DemoRun* reference) {
  std::string identical;
  for (std::size_t i = 0; i < run.completions.size(); ++i) {
    const std::vector<int>& tokens = run.completions[i].tokens;
    identical += (i == 0 ? "" : "  ") + (reference ? of(same_tokens(tokens, reference->completions[i].tokens), tokens.size())
                                                   : std::to_string(tokens.size()));
  }
  std::string pairs = "-", bytes = "-";
  if (run.counters) {
    pairs = std::format("{} / {}", run.counters->pairs_remote, run.counters->pairs_local);
    bytes = format_bytes(run.counters->bytes / std::max<std::uint64_t>(1, run.n_evaluated()));
  }
  std::printf("  %-30s  %-24s  %14s  %11s  %7.1f\n", name, identical.c_str(), pairs.c_str(), bytes.c_str(), run.decode_per_s());
}

// Runs the model over workers and twice without the plugin. True if every token is the same
// and no pair was computed here.
Result<bool> compare(boost::asio::io_context& io, const fs::path& path, const fs::path& folder, const DemoRunOptions& options,
                     const TextSink& on_text) {
  KVASIR_ASSIGN(const gguf::MoeModel model, gguf::MoeModel::open(path.string()));
  print_heading(model);
  KVASIR_ASSIGN(const auto fleet, DemoFleet::start(io, model, folder));
  print_fleet(*fleet);

  KVASIR_ASSIGN(const DemoRun kvasir, run_with_plugin(io, path, folder, fleet->links(), options, {}, on_text));
  KVASIR_ASSIGN(const DemoRun stock, run_stock(io, path, folder, options, /*repack=*/false, {}));
  KVASIR_ASSIGN(const DemoRun repacked, run_stock(io, path, folder, options, /*repack=*/true, {}));

  std::printf("%s\n  %-30s  %-24s  %14s  %11s  %7s\n", on_text ? "\n" : "", "", "tokens identical", "remote / local", "bytes/token", "tok/s");
  print_row("Kvasir, three workers", kvasir, &stock);
  print_row("llama.cpp --no-repack", stock, nullptr);
  print_row("llama.cpp, repacked weights", repacked, &stock);
  std::fflush(stdout);

  bool identical = true;
  for (std::size_t i = 0; i < kvasir.completions.size(); ++i)
    identical = identical && kvasir.completions[i].tokens == stock.completions[i].tokens;
  return identical && kvasir.counters->pairs_local == 0 && kvasir.counters->pairs_remote > 0;
}

Result<fs::path> requantize(boost::asio::io_context& io, const fs::path& model, const fs::path& folder, const std::string& type) {
  const std::string stem = model.stem().string();
  const fs::path out = folder / std::format("{}-{}.gguf", stem.substr(0, stem.rfind('-')), type);
  ChildOptions options{.executable = {}, .args = {"--allow-requantize", model.string(), out.string(), type, "1"}, .environment = {},
                       .log = folder / "quantize.log"};
  KVASIR_ASSIGN(options.executable, find_program("llama-quantize", "llama.cpp-tools"));
  ChildProcess child(io);
  KVASIR_TRY(child.start(options));
  KVASIR_ASSIGN(const int status, child.wait(kQuantizeTimeout));
  if (status != 0) return fatal(std::format("llama-quantize could not write '{}'; {}", out.string(), child.last_words()));
  return out;
}

// Random weights: a difference in the last bit changes a token at once.
Result<fs::path> random_model(const fs::path& folder) {
  const fs::path out = folder / "random.gguf";
  gguf::SynthOptions options;
  options.n_layer = 4;
  options.n_expert = 32;
  options.n_expert_used = 4;
  KVASIR_TRY(gguf::write_synthetic(options, out.string()));
  return out;
}

Result<bool> run(Options options) {
  InterruptGuard guard;
  options.run.prompts.assign(kDemoPrompts.begin(), kDemoPrompts.begin() + options.n_prompts);
  KVASIR_ASSIGN(const fs::path model, find_model(options.model));
  KVASIR_ASSIGN(const TemporaryFolder folder, TemporaryFolder::make("kvasir-demo"));
  boost::asio::io_context io;

  // The text as it comes, each prompt on a line of its own.
  int shown = -1;
  const TextSink show_text = [&](std::size_t prompt, std::string_view text) {
    if (shown != static_cast<int>(prompt)) std::printf("\n  > %s", options.run.prompts[prompt].c_str());
    shown = static_cast<int>(prompt);
    for (const char c : text) std::fputs(c == '\n' ? "\n    " : std::string(1, c).c_str(), stdout);
    std::fflush(stdout);
  };
  if (options.measure) {
    KVASIR_TRY(measure(io, model, folder.path(), options.run));
    return true;
  }
  KVASIR_ASSIGN(bool good, compare(io, model, folder.path(), options.run, show_text));
  if (options.all) {
    for (const char* type : {"Q8_0", "F16"}) {
      KVASIR_ASSIGN(const fs::path other, requantize(io, model, folder.path(), type));
      KVASIR_ASSIGN(const bool same, compare(io, other, folder.path(), options.run, {}));
      good = good && same;
    }
    KVASIR_ASSIGN(const fs::path random, random_model(folder.path()));
    KVASIR_ASSIGN(const bool same, compare(io, random, folder.path(), options.run, {}));
    good = good && same;
  }
  std::printf("\n%s\n", good ? "Every token is the same, and every expert ran on a worker."
                             : "Not the same: see the table above.");
  return good;
}

}  // namespace

void add_demo(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  // The workers have the other half.
  options->run.n_threads = std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 2, 1, 8);
  CLI::App* command = app.add_subcommand("demo", "Run a model over three workers on this machine and compare it with llama.cpp alone");
  command->add_option("--model", options->model, "GGUF file of a model with experts (default: the one shipped)");
  command->add_option("--prompts", options->n_prompts, "how many prompts")
      ->check(CLI::Range(1, static_cast<int>(kDemoPrompts.size())))->capture_default_str();
  command->add_option("--tokens", options->run.n_tokens, "tokens to generate for each")->check(CLI::Range(1, 400))->capture_default_str();
  command->add_option("-t,--threads", options->run.n_threads, "threads of llama.cpp")->check(CLI::Range(1, 512))->capture_default_str();
  auto* all = command->add_flag("--all", options->all, "also in Q8_0 and F16, and a model with random weights");
  command->add_flag("--measure", options->measure, "print the effect of OMP_WAIT_POLICY and the time of a first fallback")->excludes(all);
  command->callback([options, &exit_code] {
    const Result<bool> good = run(*options);
    exit_code = good ? (*good ? kExitOk : kExitFailed) : report(good.error());
  });
}

}  // namespace kvasir::cli
