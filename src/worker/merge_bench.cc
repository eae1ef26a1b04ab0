// worker_merge_bench: what several backbones on one worker gain when their requests share computations.
//
// One worker in this process (one compute thread), a layer of 64 experts of 3072 x 1024 in
// Q4_K/Q4_K/Q6_K, four connections that each ask for one row through 8 experts again and again.
// Merging on and off take turns. "even": every expert is as likely as any other; "skewed": the
// r-th is picked in proportion to 1 / r, nearer to what routers do. One JSON object a line.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <thread>

#include "gguf/synth.h"
#include "worker/testing.h"

namespace kvasir::worker {
namespace {

using testing::TestClient;
using testing::TestServer;
using wire::Numerics;

constexpr std::uint32_t kWidth = 3072, kExperts = 64, kTopK = 8;

struct Speed {
  double rounds_per_s = 0, p50_ms = 0, p99_ms = 0;
  double merged_share = 0;
};

std::vector<wire::Pair> pick(std::mt19937& random, bool skewed) {
  std::vector<double> share(kExperts, 1.0);
  if (skewed)
    for (std::uint32_t e = 0; e < kExperts; ++e) share[e] = 1.0 / (e + 1);
  std::discrete_distribution<std::uint32_t> draw(share.begin(), share.end());
  std::set<std::uint32_t> experts;
  while (experts.size() < kTopK) experts.insert(draw(random));
  std::vector<wire::Pair> pairs;
  for (std::uint32_t expert : experts) pairs.push_back({0, expert});
  return pairs;
}

Speed measure(const std::string& file, Numerics numerics, std::uint32_t n_backbones, bool skewed, bool merge, double seconds) {
  ServerOptions options;
  options.merged_pairs_max = merge ? kMergedPairsMax : 0;
  TestServer server({file}, options);
  const SliceStore store = testing::load({file});
  const HeldLayer& layer = *store.layers()[0];
  std::atomic<bool> stop = false;
  std::mutex mutex;
  std::vector<double> took;
  std::vector<std::thread> backbones;
  const TimePoint start = monotonic_now();
  for (std::uint32_t b = 0; b < n_backbones; ++b) {
    backbones.emplace_back([&, b] {
      std::mt19937 random(b + 1);
      TestClient client(server.port());
      client.greet();
      client.bind(0, layer.layer_id, *plain_swiglu_recipe(layer));
      const std::vector<float> row = testing::random_rows(kWidth, b + 1);
      const std::vector<float> weights(kTopK, 0.125f);
      const bool sums = numerics == Numerics::kFast;
      const wire::ExecHead head{.recipe_id = 0,
                                .numerics = numerics,
                                .result_kind = sums ? wire::ResultKind::kWeightedSum : wire::ResultKind::kPerPair,
                                .n_rows = 1,
                                .n_pairs = kTopK,
                                .n_embd = kWidth};
      std::vector<double> mine;
      for (std::uint64_t id = 1; !stop; ++id) {
        const std::vector<wire::Pair> pairs = pick(random, skewed);
        const TimePoint sent = monotonic_now();
        client.send_exec(id, head, pairs, row, sums ? std::span(weights) : std::span<const float>());
        client.result(id);
        mine.push_back(static_cast<double>((monotonic_now() - sent).count()) / 1e6);
      }
      const std::lock_guard lock(mutex);
      took.insert(took.end(), mine.begin(), mine.end());
    });
  }
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  stop = true;
  for (std::thread& backbone : backbones) backbone.join();
  const double elapsed = static_cast<double>((monotonic_now() - start).count()) / 1e9;
  std::ranges::sort(took);
  const auto n = static_cast<double>(took.size());
  return {.rounds_per_s = n / elapsed, .p50_ms = took[took.size() / 2], .p99_ms = took[took.size() * 99 / 100],
          .merged_share = static_cast<double>(server.stats().requests_merged) / n};
}

int run(double seconds) {
  testing::TempDir dir;
  const std::string file = dir / "layer.gguf";
  gguf::SynthOptions model;
  model.n_layer = 1;
  model.n_expert = kExperts;
  model.n_embd = kWidth;
  model.n_ff = 1024;
  model.gate = model.up = GGML_TYPE_Q4_K;
  model.down = GGML_TYPE_Q6_K;
  if (const auto written = gguf::write_synthetic(model, file); !written) {
    std::fprintf(stderr, "%s\n", written.error().message.c_str());
    return 1;
  }
  for (const auto& [numerics, name] : {std::pair{Numerics::kFast, "fast"}, {Numerics::kInvariant, "invariant"}, {Numerics::kExact, "exact"}}) {
    for (const bool skewed : {false, true}) {
      std::vector<double> ratios;
      Speed alone, together;
      for (int turn = 0; turn < 3; ++turn) {
        alone = measure(file, numerics, 4, skewed, false, seconds);
        together = measure(file, numerics, 4, skewed, true, seconds);
        ratios.push_back(together.rounds_per_s / alone.rounds_per_s);
      }
      std::ranges::sort(ratios);
      std::printf(R"({"bench":"merge","numerics":"%s","experts":"%s","backbones":4,"rows":1,"separate_rounds_s":%.0f,"merged_rounds_s":%.0f,"ratio_p50":%.2f,"separate_p50_ms":%.2f,"merged_p50_ms":%.2f,"separate_p99_ms":%.2f,"merged_p99_ms":%.2f,"taken_along":%.2f})" "\n",
                  name, skewed ? "skewed" : "even", alone.rounds_per_s, together.rounds_per_s, ratios[ratios.size() / 2], alone.p50_ms,
                  together.p50_ms, alone.p99_ms, together.p99_ms, together.merged_share);
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace
}  // namespace kvasir::worker

int main(int argc, char** argv) { return kvasir::worker::run(argc > 1 ? std::atof(argv[1]) : 3.0); }
