#include "cli/demo_run.h"

#include <algorithm>
#include <format>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/demo_fleet.h"

namespace kvasir::cli {
namespace {

namespace fs = std::filesystem;

Result<std::vector<Completion>> complete_all(LlamaServer& server, const DemoRunOptions& options, const TextSink& on_text) {
  std::vector<Completion> out;
  for (std::size_t i = 0; i < options.prompts.size(); ++i) {
    KVASIR_ASSIGN(Completion completion, server.complete(options.prompts[i], options.n_tokens, [&](std::string_view text) {
      if (on_text) on_text(i, text);
    }));
    out.push_back(std::move(completion));
  }
  return out;
}

}  // namespace

Result<DemoCounters> read_counters(const fs::path& path) {
  std::ifstream in(path);
  const auto json = nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object())
    return fatal(std::format("the plugin wrote no counters to '{}'; llama-server did not load it.", path.string()));
  return DemoCounters{.pairs_remote = json.value("pairs_remote", std::uint64_t{0}),
                      .pairs_local = json.value("pairs_local", std::uint64_t{0}),
                      .bytes = json.value("bytes_sent", std::uint64_t{0}) + json.value("bytes_received", std::uint64_t{0}),
                      .rounds = json.value("rounds", std::uint64_t{0})};
}

double DemoRun::decode_per_s() const {
  double tokens = 0, seconds = 0;
  for (const Completion& c : completions) {
    if (c.decode_per_s <= 0) continue;
    tokens += static_cast<double>(c.tokens.size());
    seconds += static_cast<double>(c.tokens.size()) / c.decode_per_s;
  }
  return seconds > 0 ? tokens / seconds : 0;
}

std::uint64_t DemoRun::n_evaluated() const {
  std::uint64_t n = 0;
  for (const Completion& c : completions) n += c.n_evaluated;
  return n;
}

Result<DemoRun> run_stock(boost::asio::io_context& io, const fs::path& model, const fs::path& folder, const DemoRunOptions& options,
                          bool repack, const Environment& extra) {
  KVASIR_ASSIGN(const auto server, LlamaServer::start(io, {.model = model, .folder = folder, .name = "stock", .environment = extra,
                                                           .n_threads = options.n_threads, .repack = repack}));
  DemoRun run;
  KVASIR_ASSIGN(run.completions, complete_all(*server, options, {}));
  server->stop();
  return run;
}

Result<Environment> plugin_environment(const std::string& workers, const fs::path& stats_file) {
  KVASIR_ASSIGN(const fs::path plugin, find_plugin());
  return Environment{{"GGML_BACKEND_PATH", plugin.string()}, {"KVASIR_WORKERS", workers}, {"KVASIR_STATS_FILE", stats_file.string()}};
}

Result<DemoRun> run_with_plugin(boost::asio::io_context& io, const fs::path& model, const fs::path& folder, const std::string& workers,
                                const DemoRunOptions& options, const Environment& extra, const TextSink& on_text) {
  const fs::path stats_file = folder / "stats.json";
  KVASIR_ASSIGN(Environment environment, plugin_environment(workers, stats_file));
  environment.insert(extra.begin(), extra.end());
  KVASIR_ASSIGN(const auto server, LlamaServer::start(io, {.model = model, .folder = folder, .name = "kvasir", .environment = environment,
                                                           .n_threads = options.n_threads, .repack = false}));
  DemoRun run;
  KVASIR_ASSIGN(run.completions, complete_all(*server, options, on_text));
  server->stop();
  KVASIR_ASSIGN(run.counters, read_counters(stats_file));
  std::error_code ignored;
  fs::remove(stats_file, ignored);  // the next run's must be its own
  return run;
}

std::size_t same_tokens(const std::vector<int>& a, const std::vector<int>& b) {
  return static_cast<std::size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
}

}  // namespace kvasir::cli
