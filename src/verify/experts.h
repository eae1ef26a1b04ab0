// Expert by expert, a subject against the oracle and against this machine's exact engine.
//
// A subject that claims this build's bits must give them for every row. Any other must come
// as near to the truth as the CPU does (passes_gate), layer by layer; and no expert of it may
// stand out, which is how one damaged slab is found among sound ones.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "gguf/moe_model.h"
#include "verify/agreement.h"
#include "verify/subject.h"

namespace kvasir::verify {

// Rows to try the experts of one layer with, and which of them the router sent to each.
struct LayerRows {
  wire::Recipe recipe;
  std::vector<float> rows;  // [n][n_embd]
  std::map<std::uint32_t, std::vector<std::uint32_t>> routed;  // expert -> rows
  std::uint32_t n_rows() const { return recipe.n_embd ? static_cast<std::uint32_t>(rows.size() / recipe.n_embd) : 0; }
};
// Gaussian rows, for files without a backbone.
LayerRows random_rows(const wire::Recipe& recipe, std::uint32_t n_rows, std::uint64_t seed);

struct ExpertsOptions {
  // Rows an expert is tried with: those routed to it first. Below the count at which ggml
  // changes its kernel, so that a row's bits are those of the row alone.
  std::uint32_t rows_per_expert = 4;
  std::optional<ExpertSet> layers;
  // The recipe and rows of a layer, or none to skip it.
  std::function<Result<std::optional<LayerRows>>(const gguf::LayerExperts& layer, const wire::LayerId& id)> rows_of;
  std::function<void(std::uint64_t done, std::uint64_t total)> progress;
};

enum class ExpertFault : std::uint8_t {
  kBits,       // exact was claimed, and the bits differ from the local answer's
  kNotFinite,  // NaN or infinity where the local answer is finite
  kFar,        // further from the truth than any expert of the layer is on this CPU
};
std::string_view to_string(ExpertFault fault);

struct BadExpert {
  std::uint32_t expert = 0;
  ExpertFault fault{};
  double cosine = 0;   // with the truth
  double max_abs = 0;  // from the truth
};

struct LayerVerdict {
  std::uint32_t layer = 0;
  gguf::ExpertGroup group{};
  wire::Recipe recipe;
  std::uint32_t n_experts = 0;  // tried
  Agreement subject;            // with the truth
  Agreement reference;          // this CPU's exact engine with the truth
  wire::RowType row_type = wire::RowType::kF32;
  Agreement wire;               // rows as they travel, with those rows; empty in f32
  std::vector<BadExpert> bad;
  bool near_enough() const {
    return passes_gate(subject.cosine(), reference.cosine()) && (row_type != wire::RowType::kF16 || wire.cosine() >= kF16CosineMin);
  }
  bool passes() const { return bad.empty() && near_enough(); }
};

// allclose of a worker's rows with the truth, as reported.
inline constexpr double kRowsCloseTolerance = 1e-3;

Result<std::vector<LayerVerdict>> check_experts(const gguf::MoeModel& model, Subject& subject, const ExpertsOptions& options);

}  // namespace kvasir::verify
