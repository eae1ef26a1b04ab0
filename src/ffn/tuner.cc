#include "ffn/tuner.h"

#include <algorithm>
#include <format>
#include <random>

#include "base/check.h"
#include "ffn/device.h"
#include "ffn/placement.h"

namespace kvasir::ffn {
namespace {

constexpr std::uint32_t kPairsPerRun = 256;   // at most; about 0.1 s on one slow core
constexpr std::uint32_t kExpertsPerRun = 8;
constexpr int kRunsMax = 7;                   // of a plan in a class
constexpr double kHopeless = 1.4;             // times slower than the best: not measured again
// ggml's CUDA kernels are exact enough up to 8 columns only; on CPUs those for fewer than 8
// rows are at times the faster ones.
constexpr std::uint32_t kGpuColumns = 8, kCpuRows = 7;

std::vector<const ggml_tensor*> matrices(const wire::Recipe& r, const ExpertTensors& t) {
  std::vector<const ggml_tensor*> all{t.down};
  if (r.gate_layout == wire::GateLayout::kSplit) all.push_back(t.gate);
  all.push_back(r.gate_layout == wire::GateLayout::kMerged ? t.gate_up : t.up);
  return all;
}

// One request: `n_experts` experts of `n_rows` rows each, other experts each time.
class Workload {
 public:
  Workload(const wire::Recipe& recipe, std::uint32_t n_local, std::uint32_t row_class) : recipe_(recipe), n_local_(n_local) {
    n_rows_ = 1u << row_class;
    n_experts_ = std::min({n_local, kExpertsPerRun, std::max(kPairsPerRun / n_rows_, 1u)});
    std::mt19937 rng(row_class);
    std::normal_distribution<float> normal;
    x_.resize(std::size_t{n_rows_} * recipe.n_embd);
    for (float& value : x_) value = normal(rng);
    pairs_.resize(n_experts_ * n_rows_);
    out_.resize(pairs_.size() * recipe.n_embd);
  }

  std::size_t n_pairs() const { return pairs_.size(); }

  // Seconds.
  Result<double> run(Engine& engine, std::span<const ExpertTensors> copies, bool exact) {
    for (std::uint32_t i = 0; i < pairs_.size(); ++i)
      pairs_[i] = {i / n_experts_, (next_expert_ + i % n_experts_) % n_local_};
    next_expert_ = (next_expert_ + n_experts_) % n_local_;
    const RowsView rows{x_.data(), recipe_.n_embd, n_rows_};
    const TimePoint start = monotonic_now();
    if (exact) KVASIR_TRY(engine.compute(wire::Numerics::kExact, recipe_, copies[0], rows, pairs_, out_.data()));
    else KVASIR_TRY(engine.compute_fast(recipe_, copies, rows, pairs_, out_.data()));
    return std::chrono::duration<double>(monotonic_now() - start).count();
  }

 private:
  const wire::Recipe& recipe_;
  std::uint32_t n_local_, n_rows_, n_experts_, next_expert_ = 0;
  std::vector<float> x_, out_;
  std::vector<LocalPair> pairs_;
};

struct Candidate {
  FastPlan plan;
  bool exact = false;
  int runs = 0;
  double best_s = 0;  // fastest run: what the machine does when nothing else disturbs it
};

}  // namespace

std::vector<FastPlan> candidate_plans(const wire::Recipe& recipe, std::span<const ExpertTensors> copies,
                                      const TunerOptions& options) {
  std::vector<FastPlan> plans;
  for (std::uint32_t copy = 0; copy < copies.size(); ++copy) {
    bool stacked = true, single = true;
    for (const ggml_tensor* matrix : matrices(recipe, copies[copy])) {
      const Place place = place_of(options.device, matrix);
      stacked &= place.stacked;
      single &= place.single;
    }
    if (stacked) plans.push_back({.copy = copy});
    if (single) {
      plans.push_back({.copy = copy, .per_expert = true});
      plans.push_back({.copy = copy, .per_expert = true, .rows_max = is_cpu(options.device) ? kCpuRows : kGpuColumns});
    }
  }
  return plans;
}

Result<Tuning> tune(Engine& engine, const wire::Recipe& recipe, std::span<const ExpertTensors> copies,
                    const TunerOptions& options) {
  KVASIR_CHECK(!copies.empty() && options.device);
  const TimePoint begin = monotonic_now();
  std::vector<FastPlan> plans;
  if (options.fast) plans = candidate_plans(recipe, copies, options);
  if (options.fast && plans.empty())
    return fatal("The device multiplies the experts in no way: serve them on another device.");
  Tuning tuning;
  for (std::uint32_t c = 0; c < kRowClasses; ++c) {
    if (options.fast) tuning.plans[c] = c > 0 ? tuning.plans[c - 1] : plans.front();
    // Larger classes cost more; what the small ones leave is theirs.
    const Nanos used = monotonic_now() - begin;
    if (used >= options.budget) continue;
    const TimePoint deadline = begin + used + (options.budget - used) / (kRowClasses - c) * 2;
    Workload work(recipe, copies[0].n_local, c);
    std::vector<Candidate> candidates;
    if (options.plain) candidates.push_back({.plan = {}, .exact = true});
    for (const FastPlan& plan : plans)
      if (plan.rows_max == 0 || plan.rows_max < 1u << c) candidates.push_back({.plan = plan});
    const auto run = [&](Candidate& candidate) -> Status {
      FastPlans all;
      for (std::uint32_t i = 0; i < kRowClasses; ++i) all[i] = candidate.plan;
      if (!candidate.exact) engine.set_fast_plans(all);
      KVASIR_ASSIGN(const double seconds, work.run(engine, copies, candidate.exact));
      // The first run pays for graphs and fresh memory.
      if (candidate.runs == 0 || candidate.runs == 1 || seconds < candidate.best_s) candidate.best_s = seconds;
      ++candidate.runs;
      return {};
    };
    double best = 0;
    const auto measure = [&]() -> Status {
      for (int round = 0; round < kRunsMax; ++round) {
        for (Candidate& candidate : candidates) {
          if (round >= 2 && (monotonic_now() >= deadline || candidate.best_s > best * kHopeless)) continue;
          if (round > 0 && monotonic_now() >= begin + options.budget) continue;
          KVASIR_TRY(run(candidate));
        }
        best = std::ranges::min_element(candidates, {}, &Candidate::best_s)->best_s;
      }
      return {};
    };
    KVASIR_TRY(measure());
    if (options.fast && options.n_threads >= 4) {
      // Two threads on one core's execution units may be in each other's way.
      const auto fast = [](const Candidate& a) { return a.exact ? 1e9 : a.best_s; };
      Candidate half = *std::ranges::min_element(candidates, {}, fast);
      half.plan.n_threads = options.n_threads / 2;
      half.runs = 0;
      for (int i = 0; i < 3 && monotonic_now() < begin + options.budget; ++i) KVASIR_TRY(run(half));
      if (half.runs == 3 && half.plan.per_expert) candidates.push_back(half);
    }
    double fast_s = 0;
    for (const Candidate& candidate : candidates) {
      const double pairs_per_s = static_cast<double>(work.n_pairs()) / candidate.best_s;
      if (candidate.exact) {
        tuning.exact[c] = pairs_per_s;
      } else if (fast_s == 0 || candidate.best_s < fast_s) {
        fast_s = candidate.best_s;
        tuning.plans[c] = candidate.plan;
        tuning.fast[c] = pairs_per_s;
      }
    }
  }
  if (options.fast) engine.set_fast_plans(tuning.plans);
  engine.forget_graphs();  // those of plans not picked would keep their memory
  return tuning;
}

std::string describe(const FastPlan& plan, std::span<const ExpertTensors> copies) {
  const ExpertTensors& t = copies[std::min<std::size_t>(plan.copy, copies.size() - 1)];
  const auto place = [](const ggml_tensor* matrix) { return ggml_backend_buft_name(ggml_backend_buffer_get_type(matrix->buffer)); };
  const std::string_view in = place(t.gate_up ? t.gate_up : t.up), down = place(t.down);
  const std::string places = in == down ? std::string(in) : std::format("{}, down on {}", in, down);
  std::string text = std::format("{} on {}", plan.per_expert ? "per-expert MUL_MAT" : "MUL_MAT_ID", places);
  if (plan.rows_max != 0) text += std::format(", {} rows at once", plan.rows_max);
  if (plan.n_threads != 0) text += std::format(", {} threads", plan.n_threads);
  return text;
}

}  // namespace kvasir::ffn
