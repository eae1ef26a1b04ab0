// The expert FFN over ggml: no libllama, no model, no sockets. A pure function
//   (rows, pairs) -> one output row per pair
// over the experts of one layer that are held in memory.
//
// Thread contract: an Engine is used by one thread at a time. ExpertTensors are immutable
// once built and may be shared by engines that run one after the other.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/expert_set.h"
#include "ffn/fast_plan.h"
#include "wire/messages.h"
#include "wire/recipe.h"

struct ggml_tensor;

namespace kvasir::ffn {

// The tensors of one (layer, group). Local expert id = index in the outermost dimension.
// Matrices [n_in, n_out, n_local]; biases [n_out, n_local] f32; scales [n_local] f32.
// Tensors not named by the recipe are ignored and may be null. Not owned.
struct ExpertTensors {
  ggml_tensor* gate = nullptr;  // kSplit
  ggml_tensor* up = nullptr;    // kSplit, kNone
  ggml_tensor* gate_up = nullptr;  // kMerged: n_out = 2 * n_ff
  ggml_tensor* down = nullptr;
  ggml_tensor *gate_bias = nullptr, *up_bias = nullptr, *gate_up_bias = nullptr, *down_bias = nullptr;
  ggml_tensor *gate_scale = nullptr, *up_scale = nullptr, *gate_up_scale = nullptr, *down_scale = nullptr;
  std::uint32_t n_local = 0;
  friend bool operator==(const ExpertTensors&, const ExpertTensors&) = default;
};

// One use of a held expert; `row` indexes the rows given, `expert` the tensors' outermost dimension.
struct LocalPair {
  std::uint32_t row = 0;
  std::uint32_t expert = 0;
};

// Rows as they come: `row_stride` floats apart.
struct RowsView {
  const float* data = nullptr;
  std::size_t row_stride = 0;
  std::uint32_t n_rows = 0;
};

struct EngineOptions {
  std::string device = "CPU";  // a ggml device name, e.g. "Vulkan0"
  int n_threads = 1;
  wire::Numerics numerics = wire::Numerics::kExact;
};

class Engine {
 public:
  static Result<std::unique_ptr<Engine>> create(const EngineOptions& options);
  virtual ~Engine() = default;

  // Checks that the tensors fit the recipe: presence, widths, types. One sentence if not.
  static Status check(const wire::Recipe& recipe, const ExpertTensors& tensors);

  // out[i * n_embd …] = FFN_expert(rows[pairs[i].row]) for every pair, in order. In exact
  // numerics the bits equal those of llama.cpp's own MUL_MAT_ID call on the default CPU
  // buffer, provided that all uses of an expert in the round are in `pairs`.
  // `out` holds pairs.size() * n_embd floats. Pair indices are the caller's duty to check,
  // and so is Engine::check for this recipe and these tensors.
  // In invariant numerics an expert's rows are computed in chunks small enough that each
  // row has the bits of that row alone, so callers may split and merge batches at will.
  virtual Status compute(const wire::Recipe& recipe, const ExpertTensors& tensors, RowsView rows,
                         std::span<const LocalPair> pairs, float* out) = 0;
  // As above for one request in other numerics than the engine's own.
  virtual Status compute(wire::Numerics numerics, const wire::Recipe& recipe, const ExpertTensors& tensors,
                         RowsView rows, std::span<const LocalPair> pairs, float* out) = 0;

  // Class fast: the same function by whatever plan is set for the mean rows per expert.
  // `copies` are the layer's weights in the places that the plans number; each has passed
  // Engine::check, and at least one is given.
  virtual Status compute_fast(const wire::Recipe& recipe, std::span<const ExpertTensors> copies, RowsView rows,
                              std::span<const LocalPair> pairs, float* out) = 0;
  // For the next compute_fast(); a plan for a copy that a layer lacks falls back to copy 0.
  virtual void set_fast_plans(const FastPlans& plans) = 0;

  // Graphs are cached by the addresses of their tensors: call this before any are freed.
  virtual void forget_graphs() = 0;

  // For the next compute(); cheap. A plugin's host changes it between prompt and decode.
  // Out of range values are clamped.
  virtual void set_n_threads(int n_threads) = 0;
};

// What this process computes with on a device; see wire::NumericsId. Takes a few
// milliseconds. Loads ggml's backends if need be.
Result<wire::NumericsId> numerics_id(const std::string& device = "CPU");

}  // namespace kvasir::ffn
