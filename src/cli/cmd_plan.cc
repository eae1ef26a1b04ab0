// kvasir plan: how many machines a model needs, who holds what, and what speed to expect.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <format>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/swarm_plan.h"
#include "gguf/http_source.h"

namespace kvasir::cli {
namespace {

struct Options {
  std::string path, machines, bench;
  double rtt_ms = -1, link_mbit = 1000, worker_gb_per_s = 0;
  bool json = false;
};

struct Distance {
  double rtt_ms;
  const char* what;
};
constexpr Distance kDistances[] = {
    {0.1, "one switch"}, {0.3, "a wired home network"}, {3, "Wi-Fi"}, {13, "the same city"}, {30, "the same country"}};
constexpr std::uint64_t kMachineSizes[] = {4ull << 30, 8ull << 30, 16ull << 30, 32ull << 30, 64ull << 30};

std::string span(const Span& s) {
  const auto number = [](double v) { return v < 9.95 ? std::format("{:.1f}", v) : std::format("{:.0f}", v); };
  return s.low < 0.05 ? "below " + number(std::max(0.1, s.high)) : number(s.low) + " to " + number(s.high);
}

std::string gib(std::uint64_t bytes) {
  const double value = static_cast<double>(bytes) / (1ull << 30);
  return value < 1 ? std::format("{:.0f}M", value * 1024) : std::format("{:.{}f}G", value, value == static_cast<int>(value) ? 0 : 1);
}

struct Plan {
  ModelShape model;
  std::string title;
  std::vector<std::uint64_t> machines;
  SwarmPlan swarm;
  Speeds speeds;
  std::vector<std::pair<Distance, Cost>> costs;
};

void print_machines(const Plan& plan) {
  if (plan.machines.empty()) {
    std::printf("\nmachines that hold all experts, each keeping a quarter of its memory for itself:\n\n  %-14s %12s %12s\n",
                "memory of each", "one copy", "two copies");
    for (const std::uint64_t size : kMachineSizes) {
      const std::uint64_t n = machines_needed(plan.model, size);
      std::printf("  %-14s %12llu %12llu\n", gib(size).c_str(), static_cast<unsigned long long>(n),
                  static_cast<unsigned long long>(2 * n));
    }
    std::printf("\nTwo copies, and a machine that goes away costs no speed. Name yours with --machines 4x8G,16G.\n");
    return;
  }
  std::printf("\n  %-8s %8s  %-18s %10s\n", "machine", "memory", "experts", "bytes");
  int number = 0;
  for (const Share& share : plan.swarm.shares) {
    const bool none = share.experts.begin == share.experts.end;
    const std::string experts = none ? "none left" : std::format("{}:{}", share.experts.begin, share.experts.end);
    std::printf("  %-8d %8s  %-18s %10s\n", ++number, gib(share.memory_bytes).c_str(), experts.c_str(),
                format_bytes(share.bytes).c_str());
  }
  if (plan.swarm.missing_bytes > 0)
    std::printf("\n%s of experts fit on none of them: add machines (%s more memory in all), or the backbone computes these "
                "from its own copy of the model.\n",
                format_bytes(plan.swarm.missing_bytes).c_str(),
                gib(static_cast<std::uint64_t>(static_cast<double>(plan.swarm.missing_bytes) / (1 - kMemoryKept))).c_str());
  else if (plan.swarm.copies >= 2)
    std::printf("\nThey have room for %u copies of every expert: a machine that goes away costs no speed.\n", plan.swarm.copies);
  else
    std::printf("\nOne copy of every expert: what a machine that goes away held is computed by the backbone until it is back.\n");
}

void print(const Plan& plan) {
  const ModelShape& model = plan.model;
  std::printf("%s\n%zu layers of %u experts, %u used by a token: %s of experts, %s of everything else\n", plan.title.c_str(),
              model.layers.size(), model.n_expert_max(), model.n_used, format_bytes(model.expert_bytes()).c_str(),
              format_bytes(model.dense_bytes).c_str());
  std::printf("The backbone needs %s of memory, and some for the context of each conversation.\n",
              format_bytes(model.dense_bytes).c_str());
  print_machines(plan);
  const Cost& any = plan.costs.front().second;
  if (any.bytes_per_token > 0)
    std::printf("\na token asks %.1f machines in each layer: %s on the backbone's network (class fast with f16: %s)\n",
                any.workers_asked, format_bytes(any.bytes_per_token).c_str(), format_bytes(any.bytes_per_token_f16).c_str());
  std::printf("\n  %-12s %-24s %s\n", "round trip", "", "tokens/s, one conversation");
  for (const auto& [distance, cost] : plan.costs)
    std::printf("  %-12s %-24s %s\n", std::format("{} ms", distance.rtt_ms).c_str(), distance.what,
                span(cost.tokens_per_s).c_str());
  const Distance& last = plan.costs.back().first;
  std::printf("\nNo swarm is faster than its layers x round trip: %zu x %g ms is %.2g s a token. Several conversations at once, and\n"
              "speculative decoding, share a round trip. Assumed: %s GB/s of weights at a worker, a link of %g Mbit/s.\n",
              model.layers.size(), last.rtt_ms, static_cast<double>(model.layers.size()) * last.rtt_ms / 1000,
              span({plan.speeds.worker_bytes_per_s.low / 1e9, plan.speeds.worker_bytes_per_s.high / 1e9}).c_str(),
              plan.speeds.link_bits_per_s / 1e6);
}

void print_json(const Plan& plan) {
  using nlohmann::ordered_json;
  const ModelShape& model = plan.model;
  ordered_json root = {{"n_layer", model.layers.size()},
                       {"n_expert", model.n_expert_max()},
                       {"n_expert_used", model.n_used},
                       {"expert_bytes", model.expert_bytes()},
                       {"dense_bytes", model.dense_bytes},
                       {"machines", ordered_json::array()},
                       {"machines_needed", ordered_json::array()},
                       {"speed", ordered_json::array()}};
  for (const Share& share : plan.swarm.shares)
    root["machines"].push_back(
        {{"memory", share.memory_bytes}, {"experts", {share.experts.begin, share.experts.end}}, {"bytes", share.bytes}});
  if (!plan.machines.empty()) {
    root["missing_bytes"] = plan.swarm.missing_bytes;
    root["copies"] = plan.swarm.copies;
  }
  for (const std::uint64_t size : kMachineSizes)
    root["machines_needed"].push_back({{"memory", size}, {"machines", machines_needed(model, size)}});
  for (const auto& [distance, cost] : plan.costs)
    root["speed"].push_back({{"rtt_ms", distance.rtt_ms},
                             {"workers_asked", cost.workers_asked},
                             {"bytes_per_token", cost.bytes_per_token},
                             {"bytes_per_token_f16", cost.bytes_per_token_f16},
                             {"tokens_per_s_low", cost.tokens_per_s.low},
                             {"tokens_per_s_high", cost.tokens_per_s.high}});
  std::printf("%s\n", root.dump(2).c_str());
}

// The slowest and the quickest worker in the lines of `kvasir bench worker --json`, bytes a second.
Result<Span> read_bench(const std::string& path) {
  std::ifstream in(path);
  if (!in) return fix_input(std::format("cannot read '{}'; check its path.", path));
  Span span{};
  for (std::string line; std::getline(in, line);) {
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || json.value("bench", nlohmann::json()) != "worker" || json.value("batch", nlohmann::json()) != 1) continue;
    const auto speed = json.find("gb_s");
    if (speed == json.end() || !speed->is_number() || !(speed->get<double>() > 0)) continue;
    const double bytes_per_s = speed->get<double>() * 1e9;
    span.low = span.low == 0 ? bytes_per_s : std::min(span.low, bytes_per_s);
    span.high = std::max(span.high, bytes_per_s);
  }
  if (span.high == 0)
    return fix_input(std::format("'{}' has no measurement of one row; write it with: kvasir bench worker --synthetic --json", path));
  return span;
}

Status run(const Options& options) {
  KVASIR_ASSIGN(const gguf::MoeModel file, gguf::MoeModel::open(options.path, gguf::open_any_source));
  KVASIR_TRY(file.require_experts());
  if (file.kind() == gguf::FileKind::kSlice)
    return fix_input(std::format("'{}' is a slice; plan with the model it was cut from.", options.path));
  Plan plan;
  plan.model = shape_of(file);
  plan.title = std::format("{} ({})", file.model_name().empty() ? file.file_name() : file.model_name(), file.architecture());
  if (!options.machines.empty()) {
    KVASIR_ASSIGN(plan.machines, parse_machines(options.machines));
    plan.swarm = make_plan(plan.model, plan.machines);
  }
  plan.speeds.link_bits_per_s = options.link_mbit * 1e6;
  if (options.worker_gb_per_s > 0) plan.speeds.worker_bytes_per_s = {options.worker_gb_per_s * 1e9, options.worker_gb_per_s * 1e9};
  if (!options.bench.empty()) {
    KVASIR_ASSIGN(plan.speeds.worker_bytes_per_s, read_bench(options.bench));
  }
  // Without machines: eight alike, about as many as a token asks.
  const std::vector<double> shares =
      plan.machines.empty() ? std::vector<double>(8, 1.0 / 8) : fractions(plan.model, plan.swarm);
  std::vector<Distance> distances(std::begin(kDistances), std::end(kDistances));
  if (options.rtt_ms >= 0) distances.assign(1, {options.rtt_ms, "as given"});
  for (const Distance& d : distances) plan.costs.emplace_back(d, estimate(plan.model, shares, d.rtt_ms / 1000, plan.speeds));
  if (options.json) print_json(plan);
  else print(plan);
  return {};
}

}  // namespace

void add_plan(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("plan", "How many machines a model needs, who holds what, and what speed to expect");
  command->add_option("model", options->path, "GGUF file; any part of a split set; http(s) URL")->required();
  command->add_option("--machines", options->machines, "memory of your machines, e.g. 4x8G,16G (without the backbone)");
  command->add_option("--rtt", options->rtt_ms, "round trip to the workers, ms, as ping prints it")->check(CLI::Range(0.0, 10'000.0));
  command->add_option("--link", options->link_mbit, "the backbone's network link, Mbit/s")
      ->check(CLI::Range(0.1, 1e6))
      ->capture_default_str();
  auto* speed = command->add_option("--worker-speed", options->worker_gb_per_s, "GB/s of weights that a worker reads with one row")
                    ->check(CLI::Range(0.01, 10'000.0));
  command->add_option("--bench", options->bench, "measured instead: lines of kvasir bench worker --json, of one or more workers")
      ->excludes(speed);
  command->add_flag("--json", options->json, "machine-readable");
  command->callback([options, &exit_code] { exit_code = report(run(*options)); });
}

}  // namespace kvasir::cli
