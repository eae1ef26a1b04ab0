// kvasir verify: is what the workers compute what llama.cpp computes? And the numeric oracle.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <format>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <unistd.h>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/demo_fleet.h"
#include "cli/interrupt.h"
#include "cli/verify_gate.h"
#include "cli/verify_report.h"
#include "dispatch/dispatcher.h"
#include "ffn/engine.h"
#include "ggml.h"
#include "verify/recipes.h"
#include "verify/sharding.h"
#include "verify/worker_client.h"

namespace kvasir::cli {
namespace {

namespace fs = std::filesystem;

struct Options {
  std::vector<std::string> files;
  std::string workers;
  std::string device;
  bool oracle = false;
  std::uint32_t n_shards = 3;
  std::uint32_t n_used = 0;
  std::string layers;
  fs::path prompts;
  std::size_t n_prompts = 0;
  bool no_tokens = false;
  GatePlan plan;
  std::uint32_t rows_per_expert = 4;
  std::string numerics = "exact", wire = "f32";
  bool fast() const { return numerics == "fast"; }
  bool json = false;
};

const std::map<std::string, wire::RowType> kRowTypes = {
    {"f32", wire::RowType::kF32}, {"f16", wire::RowType::kF16}, {"bf16", wire::RowType::kBF16}, {"q8", wire::RowType::kQ8}};

// Rows for files that no backbone runs: Gaussian, as many as an expert is tried with.
constexpr std::uint32_t kGaussianRows = 16;

Result<std::optional<ExpertSet>> parse_layers(const Options& options, const gguf::MoeModel& model) {
  if (options.layers.empty()) return std::optional<ExpertSet>();
  KVASIR_ASSIGN(ExpertSet layers, parse_ranges(options.layers, std::max(model.n_layer(), 1u), "layer"));
  return std::optional(std::move(layers));
}

// --- the oracle -------------------------------------------------------------------------

Result<OracleReport> check_file(const Options& options, const gguf::MoeModel& whole, std::span<const gguf::MoeModel> shards) {
  verify::ShardingOptions sharding;
  sharding.n_used = options.n_used;
  KVASIR_ASSIGN(sharding.layers, parse_layers(options, whole));
  ProgressBar bar("oracle");
  sharding.progress = [&](std::uint64_t done, std::uint64_t total) { bar.update(done, total); };
  OracleReport report{.file = whole.file_name(), .n_shards = shards.size(), .layers = {}};
  KVASIR_ASSIGN(report.layers, verify::check_sharding(whole, shards, sharding));
  return report;
}

// Slices after a model are its shards; every other file is cut into shards of its own.
Result<bool> run_oracle(const Options& options) {
  std::vector<gguf::MoeModel> models;
  for (const std::string& file : options.files) {
    KVASIR_ASSIGN(gguf::MoeModel model, gguf::MoeModel::open(file));
    KVASIR_TRY(model.require_expert_data());
    models.push_back(std::move(model));
  }
  const bool model_and_slices = models.size() > 1 && models[0].kind() == gguf::FileKind::kModel &&
                                std::ranges::all_of(models.begin() + 1, models.end(), [](const gguf::MoeModel& m) { return m.kind() == gguf::FileKind::kSlice; });
  std::vector<OracleReport> reports;
  if (model_and_slices) {
    KVASIR_ASSIGN(OracleReport report, check_file(options, models[0], std::span(models).subspan(1)));
    reports.push_back(std::move(report));
  } else {
    for (const gguf::MoeModel& model : models) {
      KVASIR_ASSIGN(const verify::Shards shards, verify::cut_shards(model, options.n_shards));
      KVASIR_ASSIGN(OracleReport report, check_file(options, model, shards.models));
      reports.push_back(std::move(report));
    }
  }
  return print(reports, options.json);
}

// --- subjects: workers or a device of this machine ------------------------------------------

struct Subjects {
  std::vector<std::unique_ptr<verify::Subject>> all;
  std::vector<std::string> links;         // for KVASIR_WORKERS; empty: a stand-in is needed
  std::vector<std::string> why_not_exact;
};

Result<Subjects> make_subjects(const Options& options, const gguf::MoeModel& model) {
  Subjects subjects;
  if (!options.device.empty()) {
    KVASIR_ASSIGN(std::unique_ptr<verify::Subject> device, verify::make_device_subject(model, options.device, options.plan.n_threads));
    subjects.all.push_back(std::move(device));
    subjects.links.emplace_back();
    subjects.why_not_exact.emplace_back();
    return subjects;
  }
  KVASIR_ASSIGN(const std::vector<dispatch::WorkerAddress> addresses, dispatch::parse_workers(options.workers));
  const char* token = std::getenv("KVASIR_TOKEN");
  verify::WorkerClientOptions client_options{.token = token ? token : "", .numerics_id = {}, .fast = options.fast(), .row_type = kRowTypes.at(options.wire)};
  KVASIR_ASSIGN(client_options.numerics_id, ffn::numerics_id());
  for (const dispatch::WorkerAddress& address : addresses) {
    KVASIR_ASSIGN(std::unique_ptr<verify::WorkerClient> client, verify::WorkerClient::connect(address, client_options));
    const std::string host = address.host.contains(':') ? "[" + address.host + "]" : address.host;
    subjects.links.push_back(!client->exact() && !options.fast() ? "" : std::format("{}:{}{}{}", host, address.port, address.fingerprint.empty() ? "" : "#", address.fingerprint));
    subjects.why_not_exact.push_back(client->why_fast());
    subjects.all.push_back(std::move(client));
  }
  return subjects;
}

Result<bool> hold_everything(const Subjects& subjects, const gguf::MoeModel& model) {
  for (const gguf::LayerExperts& layer : model.layers()) {
    KVASIR_ASSIGN(const wire::LayerId id, model.layer_id(layer));
    ExpertSet held;
    for (const auto& subject : subjects.all)
      for (const Range& range : subject->experts(layer, id).ranges()) held.add(range);
    if (held != ExpertSet::all(layer.n_expert)) return false;
  }
  return true;
}

Status run_tokens(const Options& options, const gguf::MoeModel& model, Subjects& subjects, boost::asio::io_context& io, GateReport& report) {
  KVASIR_ASSIGN(const Answers stock, ask_stock(io, options.plan));
  // A subject that may not pair in exact numerics speaks through a stand-in that answers for it.
  std::vector<std::unique_ptr<verify::StandIn>> stand_ins;
  PluginRun run;
  if (options.fast()) {
    run.numerics = options.numerics;
    run.wire = options.wire;
  }
  KVASIR_ASSIGN(const bool complete, hold_everything(subjects, model));
  run.may_compute_here = !complete;
  if (const char* token = std::getenv("KVASIR_TOKEN")) run.token = token;
  for (std::size_t i = 0; i < subjects.all.size(); ++i) {
    std::string link = subjects.links[i];
    if (link.empty()) {
      KVASIR_ASSIGN(std::unique_ptr<verify::StandIn> stand_in, verify::StandIn::start(model, subjects.all[i].get()));
      link = std::format("127.0.0.1:{}", stand_in->port());
      stand_ins.push_back(std::move(stand_in));
    }
    run.workers += (run.workers.empty() ? "" : ",") + link;
  }
  KVASIR_ASSIGN(const Answers answers, ask_with_plugin(io, options.plan, run));
  for (const auto& stand_in : stand_ins) KVASIR_TRY(stand_in->stop());
  KVASIR_ASSIGN(report.tokens, compare_answers(stock, answers));
  report.counters = answers.counters;
  report.n_prompts = options.plan.prompts.size();
  return {};
}

// With a backbone: recipes from its graph and rows from its own activations. Without: from the file.
Result<verify::ExpertsOptions> rows_for(const Options& options, const gguf::MoeModel& model, boost::asio::io_context& io) {
  verify::ExpertsOptions experts;
  experts.rows_per_expert = options.rows_per_expert;
  KVASIR_ASSIGN(experts.layers, parse_layers(options, model));
  if (model.kind() == gguf::FileKind::kModel && !options.no_tokens) {
    KVASIR_ASSIGN(auto rows, record_rows(io, options.plan, model));
    experts.rows_of = [recorded = std::move(rows)](const gguf::LayerExperts&, const wire::LayerId& id) -> Result<std::optional<verify::LayerRows>> {
      const auto found = recorded.find(id);
      return found == recorded.end() ? std::nullopt : std::optional(found->second);
    };
  } else {
    experts.rows_of = [&model](const gguf::LayerExperts& layer, const wire::LayerId&) -> Result<std::optional<verify::LayerRows>> {
      KVASIR_ASSIGN(const wire::Recipe recipe, verify::recipe_from_file(model, layer));
      return verify::random_rows(recipe, kGaussianRows, layer.layer + 1);
    };
  }
  return experts;
}

Result<bool> run_gate(Options options) {
  InterruptGuard guard;
  if (!options.fast() && options.wire != "f32") return fix_input("--wire needs --numerics fast: exact numerics know f32 rows only.");
  if (options.files.size() != 1) return fix_input("verify needs one model (several files only with --oracle).");
  KVASIR_ASSIGN(const gguf::MoeModel model, gguf::MoeModel::open(options.files[0]));
  KVASIR_TRY(model.require_expert_data());
  if (model.kind() != gguf::FileKind::kModel) options.no_tokens = true;  // nothing else can run it
  options.plan.model = options.files[0];
  KVASIR_ASSIGN(const TemporaryFolder folder, TemporaryFolder::make("kvasir-verify"));
  options.plan.folder = folder.path();
  if (!options.no_tokens) {
    KVASIR_ASSIGN(options.plan.prompts, read_prompts(options.prompts, options.n_prompts));
  }
  boost::asio::io_context io;

  GateReport report{.file = model.file_name(), .model = &model, .subjects = {}, .tokens = {}, .counters = {}};
  KVASIR_ASSIGN(Subjects subjects, make_subjects(options, model));
  KVASIR_ASSIGN(verify::ExpertsOptions experts, rows_for(options, model, io));
  ProgressBar bar("experts");
  for (std::size_t i = 0; i < subjects.all.size(); ++i) {
    verify::Subject& subject = *subjects.all[i];
    const std::size_t n = subjects.all.size();
    experts.progress = [&, i, n](std::uint64_t done, std::uint64_t total) { bar.update(i * total + done, n * total); };
    SubjectReport one{.name = subject.name(), .exact = subject.exact(), .why_not_exact = subjects.why_not_exact[i], .layers = {}};
    KVASIR_ASSIGN(one.layers, verify::check_experts(model, subject, experts));
    if (one.layers.empty())
      return fix_input(std::format("{} holds no expert of '{}' that could be checked.", subject.name(), model.file_name()));
    report.subjects.push_back(std::move(one));
  }
  if (!options.no_tokens) KVASIR_TRY(run_tokens(options, model, subjects, io, report));
  return print(report, options.json);
}

Result<bool> run(const Options& options) {
  // This process computes as a reference; a plugin named for a backbone is none of its business.
  ::unsetenv("GGML_BACKEND_PATH");
  ggml_log_set([](ggml_log_level level, const char* text, void*) { if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr); }, nullptr);
  if (options.oracle) return run_oracle(options);
  if (options.workers.empty() == options.device.empty())
    return fix_input("verify needs one of --workers host:port,…, --device NAME and --oracle.");
  return run_gate(options);
}

}  // namespace

void add_verify(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  options->plan.n_threads = std::clamp(cores, 1, 8);
  CLI::App* command = app.add_subcommand("verify", "Compare what workers or a device compute with llama.cpp and with a float64 oracle");
  command->add_option("file", options->files, "model; with --oracle also slices")->required();
  auto* workers = command->add_option("--workers", options->workers, "host:port[#fingerprint],… to judge (token: KVASIR_TOKEN)");
  auto* device = command->add_option("--device", options->device, "judge a ggml device of this machine, e.g. CPU or Vulkan0")->excludes(workers);
  command->add_flag("--oracle", options->oracle, "shards against the whole, in float64; slices after a model are its shards")
      ->excludes(workers)->excludes(device);
  command->add_option("--shards", options->n_shards, "shards to cut with --oracle")->check(CLI::Range(1, 64))->capture_default_str();
  command->add_option("--top-k", options->n_used, "experts a token uses with --oracle (default: the model's)")->check(CLI::Range(1, 1024));
  command->add_option("--layers", options->layers, "only these layers, e.g. 0:4");
  command->add_option("--prompts", options->prompts, "file of prompts, one a line (default: the set that ships)");
  command->add_option("--n-prompts", options->n_prompts, "only the first so many prompts");
  command->add_option("--tokens", options->plan.n_tokens, "tokens to generate for each prompt")->check(CLI::Range(1, 400))->capture_default_str();
  command->add_option("--rows", options->rows_per_expert, "rows each expert is tried with")->check(CLI::Range(1, 7))->capture_default_str();
  command->add_option("-t,--threads", options->plan.n_threads, "threads to compute with")->check(CLI::Range(1, 512))->capture_default_str();
  command->add_option("--numerics", options->numerics, "what to ask workers for; fast judges equal builds by nearness, too")
      ->check(CLI::IsMember({"exact", "fast"}))->excludes(device)->capture_default_str();
  command->add_option("--wire", options->wire, "how rows travel with --numerics fast")->check(CLI::IsMember({"f32", "f16", "bf16", "q8"}))
      ->excludes(device)->capture_default_str();
  command->add_flag("--no-tokens", options->no_tokens, "judge the experts only, on Gaussian rows; no llama.cpp is started");
  command->add_flag("--json", options->json, "print JSON");
  command->callback([options, &exit_code] {
    const Result<bool> accepted = run(*options);
    exit_code = accepted ? (*accepted ? kExitOk : kExitRefused) : report(accepted.error());
  });
}

}  // namespace kvasir::cli
