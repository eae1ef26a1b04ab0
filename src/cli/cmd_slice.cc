// kvasir slice: cut some experts out of a model, write a model without experts, or compare
// either with the model it came from.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <format>
#include <fstream>
#include <iterator>
#include <memory>

#include "cli/commands.h"
#include "cli/console.h"
#include "gguf/backbone.h"
#include "gguf/http_source.h"
#include "gguf/slice.h"
#include "gguf/verify.h"

namespace kvasir::cli {
namespace {

struct Options {
  std::string model;
  std::string layers = ":";
  std::string experts = ":";
  std::string plan_path;
  std::string output;
  std::string verify_path;
  bool backbone = false;
};

Result<std::string> read_plan(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return fix_input(std::format("cannot open the plan '{}': {}; check the path.", path, errno_text(errno)));
  std::string text(gguf::kMaxPlanBytes + 1, '\0');  // one more, so that a larger one is refused
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(in.gcount()));
  return text;
}

Status cut(const gguf::MoeModel& model, const Options& options) {
  gguf::SlicePlan plan;
  if (options.plan_path.empty()) {
    KVASIR_ASSIGN(plan, gguf::SlicePlan::from_ranges(model, options.layers, options.experts));
  } else {
    KVASIR_ASSIGN(const std::string text, read_plan(options.plan_path));
    KVASIR_ASSIGN(plan, gguf::SlicePlan::from_json(model, text));
  }
  KVASIR_ASSIGN(const gguf::SliceLayout layout, gguf::SliceLayout::make(model, plan));
  {
    ProgressBar bar("slice");
    KVASIR_TRY(gguf::write_slice(layout, options.output, [&](auto done, auto total) { bar.update(done, total); }));
  }
  std::uint64_t n_experts = 0;
  for (const auto& [layer, set] : plan.layers) n_experts += set.size();
  std::printf("%s: %llu experts in %zu layers, %s\n", options.output.c_str(),
              static_cast<unsigned long long>(n_experts),
              plan.layers.size(), format_bytes(layout.total_bytes()).c_str());
  return {};
}

Status write_backbone(const gguf::MoeModel& model, const Options& options) {
  {
    ProgressBar bar("backbone");
    KVASIR_TRY(gguf::write_backbone(model, options.output, [&](auto done, auto total) { bar.update(done, total); }));
  }
  std::printf("%s: the dense part of %s\n", options.output.c_str(), model.model_name().c_str());
  return {};
}

Status verify(const gguf::MoeModel& model, const std::string& path) {
  KVASIR_ASSIGN(const gguf::MoeModel made, gguf::MoeModel::open(path, gguf::open_any_source));
  gguf::Verified verified;
  {
    ProgressBar bar("verify");
    KVASIR_ASSIGN(verified, gguf::verify(made, model, [&](auto done, auto total) { bar.update(done, total); }));
  }
  std::printf("%s: identical to %s (%llu tensors, %llu slabs, %llu bytes compared)\n", path.c_str(),
              model.file_name().c_str(),
              static_cast<unsigned long long>(verified.n_tensors), static_cast<unsigned long long>(verified.n_slabs),
              static_cast<unsigned long long>(verified.n_bytes));
  return {};
}

Status run(const Options& options) {
  if (options.verify_path.empty() && options.output.empty()) return fix_input("slice needs -o OUT, the file to write.");
  KVASIR_ASSIGN(const gguf::MoeModel model, gguf::MoeModel::open(options.model, gguf::open_any_source));
  if (!options.verify_path.empty()) return verify(model, options.verify_path);
  if (options.backbone) return write_backbone(model, options);
  return cut(model, options);
}

}  // namespace

void add_slice(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("slice", "Cut experts out of a model into a small GGUF that a worker serves");
  command->add_option("model", options->model, "GGUF file; any part of a split set; http(s) URL")->required();
  auto* layers = command->add_option("-l,--layers", options->layers,
                                     "layers to keep, e.g. 0:2 or 3,7,9:12 (default: all with experts)");
  auto* experts = command->add_option("-e,--experts", options->experts,
                                      "experts to keep of each, e.g. 0:16 (default: all)");
  auto* plan = command->add_option("--plan", options->plan_path,
                                   R"(JSON file with a set a layer: {"layers": {"0": [[0,16]]}})");
  auto* output = command->add_option("-o,--output", options->output, "file to write; appears when it is complete");
  auto* backbone = command->add_flag("--backbone", options->backbone, "write everything but the experts instead");
  auto* verify = command->add_option("--verify", options->verify_path,
                                     "compare SLICE (or a backbone file) with MODEL, byte by byte");
  plan->excludes(layers)->excludes(experts);
  backbone->excludes(layers)->excludes(experts)->excludes(plan);
  verify->excludes(layers)->excludes(experts)->excludes(plan)->excludes(backbone)->excludes(output);
  command->callback([options, &exit_code] { exit_code = report(run(*options)); });
}

}  // namespace kvasir::cli
