#include "cli/bench_worker.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <format>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "base/clock.h"
#include "cli/bench_ceilings.h"
#include "cli/bench_naive.h"
#include "ffn/device.h"
#include "gguf/synth.h"
#include "nlohmann/json.hpp"
#include "worker/tuning.h"

namespace kvasir::cli {
namespace {

constexpr double kSideSecondsMin = 0.02;  // of one side of a pair: several requests if they are short
constexpr int kRequestsMax = 32;          // different ones, taken in turn

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// A layer's file, removed with the object if it was made here.
class LayerFile {
 public:
  explicit LayerFile(const BenchWorkerOptions& options) : options_(options), path_(options.slice) {}
  ~LayerFile() {
    std::error_code ignored;
    if (made_) std::filesystem::remove(path_, ignored);
  }
  Status prepare() {
    if (!path_.empty()) return {};
    path_ = std::filesystem::temp_directory_path() / std::format("kvasir-bench-{}.gguf", ::getpid());
    made_ = true;
    gguf::SynthOptions synth;
    synth.n_layer = 1;
    synth.n_expert = options_.n_expert;
    synth.n_expert_used = options_.n_used;
    synth.n_embd = options_.n_embd;
    synth.n_ff = options_.n_ff;
    KVASIR_TRY(gguf::parse_synth_types(options_.types, synth));
    return gguf::write_synthetic(synth, path_);
  }
  std::string path() const { return path_; }

 private:
  const BenchWorkerOptions& options_;
  std::filesystem::path path_;
  bool made_ = false;
};

// Both sides' view of the same tokens and experts.
struct Request {
  std::vector<float> x;
  std::vector<std::int32_t> ids;
  std::vector<ffn::LocalPair> pairs;
  std::size_t n_experts = 0;  // different ones
};

Request make_request(std::uint32_t n_tokens, std::uint32_t n_local, std::uint32_t n_used, std::uint32_t n_embd, std::mt19937& rng) {
  Request request;
  std::normal_distribution<float> normal;
  request.x.resize(std::size_t{n_tokens} * n_embd);
  for (float& value : request.x) value = normal(rng);
  std::vector<std::int32_t> deck(n_local);
  std::iota(deck.begin(), deck.end(), 0);
  std::set<std::int32_t> used;
  for (std::uint32_t token = 0; token < n_tokens; ++token) {
    std::ranges::shuffle(deck, rng);
    for (std::uint32_t k = 0; k < n_used; ++k) {
      request.ids.push_back(deck[k]);
      request.pairs.push_back({token, static_cast<std::uint32_t>(deck[k])});
      used.insert(deck[k]);
    }
  }
  request.n_experts = used.size();
  return request;
}

class Bench {
 public:
  explicit Bench(const BenchWorkerOptions& options) : options_(options), file_(options) {}

  Status prepare() {
    n_threads_ = options_.n_threads > 0 ? options_.n_threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    KVASIR_TRY(file_.prepare());
    KVASIR_ASSIGN(const gguf::MoeModel model, gguf::MoeModel::open(file_.path()));
    KVASIR_TRY(model.require_expert_data());
    const auto first = std::ranges::find_if(model.layers(), [](const gguf::LayerExperts& layer) { return !layer.held.empty(); });
    if (first == model.layers().end()) return fix_input("The file holds no experts.");
    KVASIR_ASSIGN(naive_, NaiveFfn::load(model, *first, options_.n_used, n_threads_));
    worker::StoreOptions store_options;
    store_options.only_layer = first->layer;
    store_options.verify = false;
    if (options_.numerics == "fast") store_options.packing = options_.copies > 1 ? worker::Packing::kBeside : worker::Packing::kInstead;
    if (options_.copies > 1) store_options.bytes_max = UINT64_MAX;
    const std::string path = file_.path();
    KVASIR_ASSIGN(store_, worker::SliceStore::load({&path, 1}, store_options));
    layer_ = store_->layers()[0].get();
    if (layer_->tensors.n_local < options_.n_used)
      return fix_input(std::format("The slice holds {} experts of the layer; --top-k {} needs more.", layer_->tensors.n_local, options_.n_used));
    const std::optional<wire::Recipe> recipe = worker::plain_swiglu_recipe(*layer_);
    if (!recipe) return fix_input("The layer has biases, which the comparison does not know.");
    recipe_ = *recipe;
    KVASIR_ASSIGN(engine_, ffn::Engine::create({.n_threads = n_threads_}));
    if (options_.numerics == "fast") {
      worker::TuneOptions tune_options;
      tune_options.n_threads = n_threads_;
      KVASIR_ASSIGN(const auto tuned, worker::tune_store(*store_, *engine_, tune_options));
      if (!tuned) return fix_input("The layer has a shape that nothing can be measured on.");
      plans_ = tuned->tuning.plans;
    }
    ceilings_ = measure_ceilings(n_threads_);
    return {};
  }

  Result<BenchRow> measure(std::uint32_t batch) {
    std::mt19937 rng(batch);
    // Enough that all the experts held are read before one recurs: caches stay cold on both sides.
    const int n_requests = std::clamp(static_cast<int>(1024 / batch), 2, kRequestsMax);
    std::vector<Request> requests;
    for (int i = 0; i < n_requests; ++i)
      requests.push_back(make_request(batch, layer_->tensors.n_local, options_.n_used, recipe_.n_embd, rng));
    std::vector<float> naive_out(requests[0].pairs.size() * recipe_.n_embd), out(naive_out.size());
    KVASIR_TRY(naive_->compute(requests[0].x, requests[0].ids, naive_out.data()));
    KVASIR_TRY(ours(requests[0], out));
    KVASIR_TRY(compare(naive_out, out));

    std::size_t next_naive = 0, next_ours = 0;
    const auto time_naive = [&](int n) -> Result<double> {
      const TimePoint start = monotonic_now();
      for (int i = 0; i < n; ++i) {
        const Request& request = requests[next_naive++ % requests.size()];
        KVASIR_TRY(naive_->compute(request.x, request.ids, naive_out.data()));
      }
      return std::chrono::duration<double>(monotonic_now() - start).count() / n;
    };
    const auto time_ours = [&](int n) -> Result<double> {
      const TimePoint start = monotonic_now();
      for (int i = 0; i < n; ++i) KVASIR_TRY(ours(requests[next_ours++ % requests.size()], out));
      return std::chrono::duration<double>(monotonic_now() - start).count() / n;
    };
    KVASIR_ASSIGN(const double once, time_naive(1));
    const int n = std::max(1, static_cast<int>(kSideSecondsMin / once));
    std::vector<double> naive_s, ours_s, ratios;
    for (int pair = 0; pair < options_.pairs; ++pair) {
      double a = 0, b = 0;
      if (pair % 2 == 0) {
        KVASIR_ASSIGN(a, time_naive(n));
        KVASIR_ASSIGN(b, time_ours(n));
      } else {
        KVASIR_ASSIGN(b, time_ours(n));
        KVASIR_ASSIGN(a, time_naive(n));
      }
      naive_s.push_back(a);
      ours_s.push_back(b);
      ratios.push_back(a / b);
    }
    const double seconds = median(ours_s);
    double n_experts = 0;
    for (const Request& request : requests) n_experts += static_cast<double>(request.n_experts) / static_cast<double>(requests.size());
    const double flop = 2.0 * 3 * recipe_.n_embd * recipe_.n_ff * static_cast<double>(requests[0].pairs.size());
    BenchRow row;
    row.batch = batch;
    row.naive_tok_s = batch / median(naive_s);
    row.tok_s = batch / seconds;
    row.ratio = median(ratios);
    row.ms = seconds * 1e3;
    row.gflop_s = flop / seconds / 1e9;
    row.gb_s = n_experts * expert_bytes() / seconds / 1e9;
    row.of_memory = row.gb_s / ceilings_.read_gb_s;
    row.of_compute = row.gflop_s / ceilings_.fma_gflop_s;
    row.plan = options_.numerics == "fast"
                   ? ffn::describe(plans_[ffn::FastPlans::class_of(requests[0].pairs.size(), requests[0].n_experts)], layer_->copies)
                   : "MUL_MAT_ID on CPU, huge pages";
    return row;
  }

  const Ceilings& ceilings() const { return ceilings_; }
  int n_threads() const { return n_threads_; }
  std::string title() const {
    return std::format("{} experts of {}x{}, {} used, {}, {} threads, {}", layer_->tensors.n_local, recipe_.n_embd, recipe_.n_ff,
                       options_.n_used, options_.slice.empty() ? options_.types : options_.slice, n_threads_,
                       options_.numerics == "fast" ? std::format("class fast, {} cop{} of the weights", options_.copies, options_.copies > 1 ? "ies" : "y")
                                                   : std::string("class exact"));
  }

 private:
  Status ours(const Request& request, std::vector<float>& out) {
    const ffn::RowsView rows{request.x.data(), recipe_.n_embd, static_cast<std::uint32_t>(request.x.size() / recipe_.n_embd)};
    if (options_.numerics == "fast") return engine_->compute_fast(recipe_, layer_->copies, rows, request.pairs, out.data());
    return engine_->compute(recipe_, layer_->tensors, rows, request.pairs, out.data());
  }
  // A benchmark of a wrong result is worth nothing.
  static Status compare(const std::vector<float>& a, const std::vector<float>& b) {
    double ab = 0, aa = 0, bb = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      ab += double{a[i]} * b[i];
      aa += double{a[i]} * a[i];
      bb += double{b[i]} * b[i];
    }
    if (!(ab * ab >= 0.9999 * aa * bb)) return fatal("The two sides do not compute the same: this build must not be used.");
    return {};
  }
  double expert_bytes() const {
    double bytes = 0;
    for (const ggml_tensor* t : {layer_->tensors.gate, layer_->tensors.up, layer_->tensors.gate_up, layer_->tensors.down})
      if (t) bytes += static_cast<double>(ggml_nbytes(t)) / layer_->tensors.n_local;
    return bytes;
  }

  const BenchWorkerOptions& options_;
  LayerFile file_;
  int n_threads_ = 1;
  std::unique_ptr<NaiveFfn> naive_;
  std::optional<worker::SliceStore> store_;
  const worker::HeldLayer* layer_ = nullptr;
  wire::Recipe recipe_;
  std::unique_ptr<ffn::Engine> engine_;
  ffn::FastPlans plans_;
  Ceilings ceilings_;
};

void print_json(const Bench& bench, const BenchWorkerOptions& options, const BenchRow& row) {
  const nlohmann::json line{{"bench", "worker"}, {"batch", row.batch}, {"threads", bench.n_threads()}, {"copies", options.copies},
                            {"numerics", options.numerics}, {"tok_s", row.tok_s}, {"naive_tok_s", row.naive_tok_s},
                            {"ratio", row.ratio}, {"ms", row.ms}, {"gflop_s", row.gflop_s}, {"gb_s", row.gb_s},
                            {"of_memory", row.of_memory}, {"of_compute", row.of_compute}, {"plan", row.plan},
                            {"read_gb_s", bench.ceilings().read_gb_s}, {"fma_gflop_s", bench.ceilings().fma_gflop_s}};
  std::printf("%s\n", line.dump().c_str());
}

}  // namespace

Status bench_worker(const BenchWorkerOptions& options) {
  Bench bench(options);
  KVASIR_TRY(bench.prepare());
  if (!options.json) {
    std::printf("%s\nceilings: %.1f GB/s read, %.0f GFLOP/s in f32 multiply-adds; medians of %d alternating pairs\n\n", bench.title().c_str(),
                bench.ceilings().read_gb_s, bench.ceilings().fma_gflop_s, options.pairs);
    std::printf("%6s %10s %10s %7s %9s %9s %7s %5s %8s  %s\n", "batch", "naive t/s", "t/s", "ratio", "ms", "GFLOP/s", "GB/s", "mem", "compute", "plan");
  }
  std::vector<BenchRow> rows;
  for (const std::uint32_t batch : options.batches) {
    KVASIR_ASSIGN(const BenchRow row, bench.measure(batch));
    if (options.json) print_json(bench, options, row);
    else
      std::printf("%6u %10.1f %10.1f %6.2fx %9.2f %9.1f %7.2f %4.0f%% %7.0f%%  %s\n", row.batch, row.naive_tok_s, row.tok_s, row.ratio, row.ms,
                  row.gflop_s, row.gb_s, row.of_memory * 100, row.of_compute * 100, row.plan.c_str());
    std::fflush(stdout);
    rows.push_back(row);
  }
  return options.plot.empty() ? Status{} : write_plot(options.plot, bench.title(), rows);
}

}  // namespace kvasir::cli
