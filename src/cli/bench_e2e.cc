#include "cli/bench_e2e.h"

#include <unistd.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <cstdio>
#include <format>
#include <map>
#include <memory>
#include <optional>

#include "cli/child_process.h"
#include "cli/demo_fleet.h"
#include "cli/interrupt.h"
#include "ffn/brief_waits.h"
#include "nlohmann/json.hpp"

namespace kvasir::cli {
namespace {

using nlohmann::json;

// The first run of a process touches the pages of a mapped file for the first time, which is not
// what is compared.
constexpr int kRepetitions = 3;
constexpr std::chrono::seconds kStartTimeout{180};  // a worker reads its experts, the tuner runs
constexpr std::chrono::seconds kRunTimeout{900};

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values.empty() ? 0 : values[values.size() / 2];
}

struct Speeds {
  std::vector<double> prompt, decode;  // tokens a second, one a run
};

// Debian keeps it beside llama.cpp's libraries, not on PATH.
Result<std::filesystem::path> find_rpc_server() {
  std::error_code ignored;
  for (const auto& triplet : std::filesystem::directory_iterator("/usr/libexec", ignored)) {
    const std::filesystem::path program = triplet.path() / "llama/bin/ggml-rpc-server";
    if (std::filesystem::exists(program, ignored)) return program;
  }
  return find_program("ggml-rpc-server", "llama.cpp-tools");
}

class E2e {
 public:
  explicit E2e(const BenchE2eOptions& options) : options_(options) {}

  Status prepare() {
    KVASIR_ASSIGN(TemporaryFolder folder, TemporaryFolder::make("kvasir-e2e"));
    folder_.emplace(std::move(folder));
    KVASIR_ASSIGN(llama_bench_, find_program("llama-bench", "llama.cpp-tools"));
    for (const std::string& side : options_.sides) {
      if (side == "rpc") KVASIR_TRY(start_rpc());
      if (side == "exact" || side == "fast") KVASIR_TRY(start_workers(side));
    }
    return {};
  }

  // One llama-bench process: the prompt, then decoding.
  Status run(const std::string& side) {
    ChildOptions child{.executable = llama_bench_, .args = {"-m", options_.model, "-p", std::to_string(options_.n_prompt), "-n",
                                                            std::to_string(options_.n_decode), "-t", std::to_string(options_.n_threads),
                                                            "-r", std::to_string(kRepetitions), "-ngl", "0", "-o", "jsonl"},
                       .environment = {}, .log = folder_->path() / (side + ".log")};
    // What lies in workers is not repacked, so that --repack decides about the dense weights only.
    child.args.insert(child.args.end(), {"--repack", side == "no-repack" || side == "exact" ? "0" : "1"});
    if (side == "rpc") {
      child.args.insert(child.args.end(), {"--rpc", rpc_address_, "-ot", std::format("exps=RPC0[{}]", rpc_address_)});
      child.environment["OMP_WAIT_POLICY"] = "passive";
    }
    if (side == "exact" || side == "fast") {
      KVASIR_ASSIGN(const std::filesystem::path plugin, find_plugin());
      child.environment = {{"GGML_BACKEND_PATH", plugin.string()}, {"KVASIR_WORKERS", links_[side]}, {"KVASIR_LOCAL", "never"},
                           {"KVASIR_NUMERICS", side}};
      ffn::add_brief_waits(child.environment);
    }
    ChildProcess process(io_);
    KVASIR_TRY(process.start(child));
    Speeds& speeds = speeds_[side];
    for (const int n : {options_.n_prompt, options_.n_decode}) {
      if (n == 0) continue;
      double speed = 0;
      while (speed == 0) {
        const Result<std::string> line = process.read_line(std::chrono::duration_cast<std::chrono::milliseconds>(kRunTimeout));
        if (!line) return fatal(std::format("llama-bench ended without figures for '{}'; {}", side, process.last_words()));
        const json test = json::parse(*line, nullptr, /*allow_exceptions=*/false);
        if (!test.is_object()) continue;
        std::vector<double> samples = test.value("samples_ts", std::vector<double>{});
        if (samples.size() > 1) samples.erase(samples.begin());
        for (const double sample : samples) speed += sample / static_cast<double>(samples.size());
      }
      (n == options_.n_prompt && speeds.prompt.size() <= speeds.decode.size() ? speeds.prompt : speeds.decode).push_back(speed);
    }
    KVASIR_TRY(process.wait(kStartTimeout));
    std::fprintf(stderr, "%-10s prompt %8.1f  decode %7.2f tok/s\n", side.c_str(), speeds.prompt.empty() ? 0 : speeds.prompt.back(),
                 speeds.decode.empty() ? 0 : speeds.decode.back());
    return {};
  }

  const Speeds& speeds(const std::string& side) { return speeds_[side]; }

 private:
  Status start_rpc() {
    KVASIR_ASSIGN(const std::filesystem::path server, find_rpc_server());
    const int port = 20000 + static_cast<int>(::getpid() % 20000);
    rpc_address_ = std::format("127.0.0.1:{}", port);
    children_.push_back(std::make_unique<ChildProcess>(io_));
    return children_.back()->start({.executable = server, .args = {"-H", "127.0.0.1", "-p", std::to_string(port), "-t", std::to_string(options_.n_threads)},
                                    .environment = {{"OMP_WAIT_POLICY", "passive"}}, .log = folder_->path() / "rpc.log"});
  }

  Status start_workers(const std::string& numerics) {
    KVASIR_ASSIGN(const std::filesystem::path self, own_executable());
    for (int i = 0; i < options_.n_workers; ++i) {
      children_.push_back(std::make_unique<ChildProcess>(io_));
      const std::string name = std::format("{}-{}", numerics, i);
      KVASIR_TRY(children_.back()->start({.executable = self,
                                          .args = {"worker", "--serve", "127.0.0.1:0", "--slice", options_.model, "--threads",
                                                   std::to_string(options_.n_threads), "--numerics", numerics, "--no-verify",
                                                   "--data", (folder_->path() / "data").string()},
                                          .environment = {},  // a worker sets its own waits
                                          .log = folder_->path() / (name + ".log")}));
      const Result<std::string> link = children_.back()->read_line(kStartTimeout);
      if (!link) return fatal(std::format("worker {} did not start; {}", name, children_.back()->last_words()));
      links_[numerics] += (links_[numerics].empty() ? "" : ",") + *link;
    }
    return {};
  }

  const BenchE2eOptions& options_;
  boost::asio::io_context io_;
  std::optional<TemporaryFolder> folder_;
  std::filesystem::path llama_bench_;
  std::string rpc_address_;
  std::map<std::string, std::string> links_;  // by class
  std::vector<std::unique_ptr<ChildProcess>> children_;
  std::map<std::string, Speeds> speeds_;
};

}  // namespace

Status bench_e2e(const BenchE2eOptions& options) {
  E2e bench(options);
  KVASIR_TRY(bench.prepare());
  for (int run = 0; run < options.runs; ++run) {
    std::vector<std::string> order = options.sides;
    if (run % 2 == 1) std::ranges::reverse(order);
    for (const std::string& side : order) {
      if (interrupted()) return fatal("interrupted.");
      KVASIR_TRY(bench.run(side));
    }
  }
  const Speeds& base = bench.speeds(options.sides.front());
  const double base_prompt = median(base.prompt), base_decode = median(base.decode);
  if (!options.json)
    std::printf("medians of %d alternating runs, ratios to '%s'\n\n%-10s %14s %7s %14s %7s\n", options.runs, options.sides.front().c_str(), "side",
                std::format("pp{} tok/s", options.n_prompt).c_str(), "ratio", std::format("tg{} tok/s", options.n_decode).c_str(), "ratio");
  for (const std::string& side : options.sides) {
    const Speeds& speeds = bench.speeds(side);
    const double prompt = median(speeds.prompt), decode = median(speeds.decode);
    const double prompt_ratio = base_prompt > 0 ? prompt / base_prompt : 0, decode_ratio = base_decode > 0 ? decode / base_decode : 0;
    if (options.json) {
      const json line{{"bench", "e2e"}, {"side", side}, {"threads", options.n_threads}, {"workers", options.n_workers},
                      {"prompt_tok_s", prompt}, {"decode_tok_s", decode}, {"base", options.sides.front()},
                      {"prompt_ratio", prompt_ratio}, {"decode_ratio", decode_ratio}, {"prompt_runs", speeds.prompt}, {"decode_runs", speeds.decode}};
      std::printf("%s\n", line.dump().c_str());
    } else {
      std::printf("%-10s %14.1f %6.2fx %14.2f %6.2fx\n", side.c_str(), prompt, prompt_ratio, decode, decode_ratio);
    }
  }
  return {};
}

}  // namespace kvasir::cli
