// Measures the plans of class fast on weights as they are held, and picks one for each class
// of mean rows per expert.
#pragma once

#include <array>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "ffn/engine.h"
#include "ggml-cpp.h"

namespace kvasir::ffn {

// Pairs a second, by row class; 0: not measured.
using Speeds = std::array<double, kRowClasses>;

struct Tuning {
  FastPlans plans;
  Speeds fast{};   // with the plans picked
  Speeds exact{};  // with the exact plan; 0 where copy 0 cannot serve it
};

struct TunerOptions {
  ggml_backend_dev_t device = nullptr;
  int n_threads = 1;
  bool plain = true;  // copies[0] lies as class exact needs it
  bool fast = true;   // false, with plain: the exact plan alone is measured, and no plans are set
  Nanos budget = std::chrono::milliseconds(4500);  // for everything
};

// The plans worth a try for these copies on this device.
std::vector<FastPlan> candidate_plans(const wire::Recipe& recipe, std::span<const ExpertTensors> copies,
                                      const TunerOptions& options);

// Experts are taken in turn, so that weights come from memory as they do in use. Past the
// budget the remaining classes get the plan of the class before. Leaves the plans set.
Result<Tuning> tune(Engine& engine, const wire::Recipe& recipe, std::span<const ExpertTensors> copies,
                    const TunerOptions& options);

// "MUL_MAT_ID, copy 0", for people.
std::string describe(const FastPlan& plan, std::span<const ExpertTensors> copies);

}  // namespace kvasir::ffn
