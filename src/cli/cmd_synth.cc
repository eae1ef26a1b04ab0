// kvasir synth: a model of a wanted geometry with random weights.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "cli/console.h"
#include "gguf/synth.h"

namespace kvasir::cli {
namespace {

Status run(gguf::SynthOptions options, const std::string& types, const std::string& output) {
  KVASIR_TRY(gguf::parse_synth_types(types, options));
  ProgressBar bar("synth");
  return gguf::write_synthetic(options, output, [&](auto done, auto total) { bar.update(done, total); });
}

}  // namespace

void add_synth(CLI::App& app, int& exit_code) {
  struct Options {
    gguf::SynthOptions synth;
    std::string types, output;
  };
  auto options = std::make_shared<Options>();
  gguf::SynthOptions& synth = options->synth;
  CLI::App* command = app.add_subcommand("synth", "Write a model with random weights, for tests and benchmarks");
  command->add_option("--arch", synth.architecture, "qwen3moe, or qwen2moe (with a shared expert)")
      ->capture_default_str();
  command->add_option("--layers", synth.n_layer, "layers")->capture_default_str();
  command->add_option("--experts", synth.n_expert, "experts in each layer")->capture_default_str();
  command->add_option("--top-k", synth.n_expert_used, "experts used for a token")->capture_default_str();
  command->add_option("--n-embd", synth.n_embd, "width of the model, a multiple of 64")->capture_default_str();
  command->add_option("--n-ff", synth.n_ff, "inner width of an expert")->capture_default_str();
  command->add_option("--shared-ff", synth.n_ff_shared, "inner width of the shared expert (qwen2moe; default: --n-ff)");
  command->add_option("--vocab", synth.n_vocab, "tokens (default: as many as the tokenizer needs)");
  command->add_option("--context", synth.n_context, "context length")->capture_default_str();
  command->add_option("--types", options->types,
                      "tensor types (default: gate=Q4_K,up=Q4_K,down=Q6_K,dense=Q8_0; experts=T sets three)");
  command->add_option("--seed", synth.seed, "the same seed gives the same file")->capture_default_str();
  command->add_flag("--sparse", synth.sparse, "leave the experts as holes: all zero, no disk space");
  command->add_option("-o,--output", options->output, "file to write")->required();
  command->callback([options, &exit_code] {
    exit_code = report(run(options->synth, options->types, options->output));
  });
}

}  // namespace kvasir::cli
