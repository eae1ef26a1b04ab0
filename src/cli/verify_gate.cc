#include "cli/verify_gate.h"

#include <algorithm>
#include <cmath>
#include <format>
#include <fstream>
#include <span>

#include "cli/demo_fleet.h"
#include "cli/llama_server.h"
#include "ffn/brief_waits.h"

namespace kvasir::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kShippedPrompts = "prompts.txt";
constexpr std::size_t kPromptsFileBytesMax = 1 << 20;
constexpr std::size_t kPromptsMax = 1024;
// Prompts that are recorded: some hundred rows, so that most experts have rows of their own.
constexpr std::size_t kRecordedPrompts = 8;

Result<fs::path> find_prompts() {
  KVASIR_ASSIGN(const fs::path self, own_executable());
  const fs::path prefix = self.parent_path().parent_path();
  for (const fs::path& place : {prefix.parent_path() / "models", prefix / "share" / "kvasir" / "models"})
    if (fs::exists(place / kShippedPrompts)) return place / kShippedPrompts;
  return fix_input(std::format("the prompts {} are not beside this program; name a file with --prompts.", kShippedPrompts));
}

std::string first_half(const std::string& prompt) {
  const std::size_t space = prompt.rfind(' ', prompt.size() / 2);
  return space == std::string::npos || space == 0 ? prompt : prompt.substr(0, space);
}

Result<Answers> ask(LlamaServer& server, const GatePlan& plan) {
  Answers answers;
  for (const std::string& prompt : plan.prompts) {
    KVASIR_ASSIGN(Completion completion, server.complete(prompt, plan.n_tokens, [](std::string_view) {}));
    answers.tokens.push_back(std::move(completion.tokens));
    for (const std::string& text : {prompt, first_half(prompt)}) {
      KVASIR_ASSIGN(std::vector<float> next, server.next_token(text));
      answers.next.push_back(std::move(next));
    }
  }
  return answers;
}

LlamaServerOptions server_options(const GatePlan& plan, const char* name, Environment environment) {
  // Threads that spin between layers would only slow down whoever answers for the experts.
  ffn::add_brief_waits(environment);
  return {.model = plan.model, .folder = plan.folder, .name = name, .environment = std::move(environment), .n_threads = plan.n_threads,
          .repack = false};
}

// Pearson's correlation: the cosine of both less their means, over the tokens that are possible
// at all. 0 where the two disagree about which are.
double centred_cosine(std::span<const float> a, std::span<const float> b) {
  double n = 0, sum_a = 0, sum_b = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isfinite(a[i]) != std::isfinite(b[i])) return 0;
    if (!std::isfinite(a[i])) continue;
    ++n;
    sum_a += a[i];
    sum_b += b[i];
  }
  double dot = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i])) continue;
    const double x = a[i] - sum_a / n, y = b[i] - sum_b / n;
    dot += x * y;
    aa += x * x;
    bb += y * y;
  }
  return aa > 0 && bb > 0 ? dot / (std::sqrt(aa) * std::sqrt(bb)) : aa == bb ? 1 : 0;
}

}  // namespace

Result<std::vector<std::string>> read_prompts(const fs::path& given, std::size_t n_max) {
  fs::path path = given;
  if (path.empty()) {
    KVASIR_ASSIGN(path, find_prompts());
  }
  std::ifstream in(path);
  if (!in) return fix_input(std::format("cannot read the prompts '{}'.", path.string()));
  std::vector<std::string> prompts;
  std::size_t n_bytes = 0;
  for (std::string line; std::getline(in, line) && prompts.size() < (n_max ? n_max : kPromptsMax);) {
    n_bytes += line.size();
    if (n_bytes > kPromptsFileBytesMax) return fix_input(std::format("'{}' is too large for a set of prompts (1 MiB).", path.string()));
    if (!line.empty() && line[0] != '#') prompts.push_back(std::move(line));
  }
  if (prompts.empty()) return fix_input(std::format("'{}' holds no prompts; write one on each line.", path.string()));
  return prompts;
}

Result<Answers> ask_stock(boost::asio::io_context& io, const GatePlan& plan) {
  KVASIR_ASSIGN(const auto server, LlamaServer::start(io, server_options(plan, "stock", {})));
  KVASIR_ASSIGN(Answers answers, ask(*server, plan));
  server->stop();
  return answers;
}

Result<Answers> ask_with_plugin(boost::asio::io_context& io, const GatePlan& plan, const PluginRun& run) {
  const fs::path stats = plan.folder / "verify-stats.json";
  KVASIR_ASSIGN(Environment environment, plugin_environment(run.workers, stats));
  if (!run.token.empty()) environment["KVASIR_TOKEN"] = run.token;
  if (!run.numerics.empty()) environment["KVASIR_NUMERICS"] = run.numerics;
  if (!run.wire.empty()) environment["KVASIR_WIRE"] = run.wire;
  environment["KVASIR_LOCAL"] = run.may_compute_here ? "fallback" : "never";
  KVASIR_ASSIGN(const auto server, LlamaServer::start(io, server_options(plan, "kvasir", std::move(environment))));
  KVASIR_ASSIGN(Answers answers, ask(*server, plan));
  server->stop();
  KVASIR_ASSIGN(answers.counters, read_counters(stats));
  std::error_code ignored;
  fs::remove(stats, ignored);  // the next run's must be its own
  return answers;
}

Result<std::map<wire::LayerId, verify::LayerRows>> record_rows(boost::asio::io_context& io, const GatePlan& plan, const gguf::MoeModel& model) {
  KVASIR_ASSIGN(const auto recorder, verify::StandIn::start(model));
  KVASIR_ASSIGN(Environment environment, plugin_environment(std::format("127.0.0.1:{}", recorder->port()), plan.folder / "record-stats.json"));
  {
    KVASIR_ASSIGN(const auto server, LlamaServer::start(io, server_options(plan, "record", std::move(environment))));
    for (std::size_t i = 0; i < std::min(plan.prompts.size(), kRecordedPrompts); ++i)
      KVASIR_TRY(server->complete(plan.prompts[i], 1, [](std::string_view) {}));
    server->stop();
  }
  return recorder->stop();
}

Result<GateFigures> compare_answers(const Answers& stock, const Answers& other) {
  GateFigures figures;
  for (std::size_t i = 0; i < stock.tokens.size(); ++i) {
    figures.tokens += stock.tokens[i].size();
    figures.tokens_same += same_tokens(other.tokens[i], stock.tokens[i]);
  }
  for (std::size_t i = 0; i < stock.next.size(); ++i) {
    const std::vector<float>&a = stock.next[i], &b = other.next[i];
    if (a.size() != b.size()) return fatal("llama-server gave vocabularies of two sizes for one model.");
    ++figures.places;
    figures.argmax_same += std::ranges::max_element(a) - a.begin() == std::ranges::max_element(b) - b.begin();
    figures.cosine_min = std::min(figures.cosine_min, centred_cosine(a, b));
    for (std::size_t t = 0; t < a.size(); ++t)
      if (a[t] != b[t]) figures.max_abs = std::max(figures.max_abs, std::abs(double{a[t]} - double{b[t]}));
  }
  return figures;
}

}  // namespace kvasir::cli
