#include "verify/experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <format>
#include <random>

#include "ffn/oracle.h"
#include "verify/expert_loader.h"
#include "wire/codec.h"

namespace kvasir::verify {
namespace {

struct ExpertFigures {
  std::uint32_t expert = 0;
  Agreement subject, reference;
  bool same_bits = true;
  bool finite = true;  // the subject is, or the reference is not either
};

bool all_finite(std::span<const float> values) {
  return std::ranges::all_of(values, [](float value) { return std::isfinite(value); });
}

// Which rows an expert is tried with: those routed to it, then others, none twice.
std::vector<std::uint32_t> rows_for(const LayerRows& rows, std::uint32_t expert, std::uint32_t wanted) {
  std::vector<std::uint32_t> chosen;
  if (const auto routed = rows.routed.find(expert); routed != rows.routed.end())
    chosen.assign(routed->second.begin(), routed->second.begin() + std::min<std::ptrdiff_t>(wanted, std::ssize(routed->second)));
  for (std::uint32_t i = 0; i < rows.n_rows() && chosen.size() < wanted; ++i) {
    const std::uint32_t row = (expert * wanted + i) % rows.n_rows();
    if (std::ranges::find(chosen, row) == chosen.end()) chosen.push_back(row);
  }
  return chosen;
}

class LayerCheck {
 public:
  LayerCheck(const gguf::MoeModel& model, const gguf::LayerExperts& layer, const wire::LayerId& id, const LayerRows& rows,
             Subject& subject, ffn::Engine& engine, std::uint32_t rows_per_expert)
      : model_(model), layer_(layer), id_(id), rows_(rows), subject_(subject), engine_(engine), rows_per_expert_(rows_per_expert) {}

  // Adds the figures of some experts, few enough to be in memory at once.
  Status add(std::span<const std::uint32_t> experts, ggml_backend_buffer_type_t cpu) {
    const std::size_t n_embd = rows_.recipe.n_embd;
    std::vector<wire::Pair> pairs;
    std::vector<ffn::LocalPair> local;
    for (std::uint32_t i = 0; i < experts.size(); ++i)
      for (std::uint32_t row : rows_for(rows_, experts[i], rows_per_expert_)) {
        pairs.push_back({row, experts[i]});
        local.push_back({row, i});
      }
    const ffn::RowsView view{rows_.rows.data(), n_embd, rows_.n_rows()};
    std::vector<float> answer(pairs.size() * n_embd), reference(pairs.size() * n_embd);
    KVASIR_ASSIGN(const LoadedExperts loaded, load_experts(model_, layer_, experts, cpu));
    KVASIR_TRY(ffn::Engine::check(rows_.recipe, loaded.tensors));
    const Status computed = engine_.compute(rows_.recipe, loaded.tensors, view, local, reference.data());
    engine_.forget_graphs();
    KVASIR_TRY(computed);
    KVASIR_TRY(subject_.compute(layer_, id_, rows_.recipe, view, pairs, answer.data()));

    std::vector<double> truth(n_embd);
    std::optional<ffn::ExpertOracle> oracle;
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      if (figures_.empty() || figures_.back().expert != pairs[i].expert) {
        figures_.push_back({.expert = pairs[i].expert, .subject = {}, .reference = {}});
        oracle.emplace(rows_.recipe, loaded.tensors, local[i].expert);
      }
      ExpertFigures& figures = figures_.back();
      oracle->compute(std::span(rows_.rows).subspan(pairs[i].row * n_embd, n_embd), truth);
      const auto mine = std::span(answer).subspan(i * n_embd, n_embd), exact = std::span(reference).subspan(i * n_embd, n_embd);
      figures.same_bits = figures.same_bits && std::memcmp(mine.data(), exact.data(), mine.size_bytes()) == 0;
      const bool reference_finite = all_finite(exact);
      figures.finite = figures.finite && (all_finite(mine) || !reference_finite);
      if (!reference_finite) continue;  // there is nothing to be near to
      travel(std::span<const float>(rows_.rows).subspan(pairs[i].row * n_embd, n_embd));
      travel(exact);
      figures.subject.add(truth, std::span<const float>(mine));
      figures.reference.add(truth, std::span<const float>(exact));
    }
    return {};
  }

  LayerVerdict verdict() const {
    LayerVerdict verdict{.layer = layer_.layer, .group = layer_.group, .recipe = rows_.recipe,
                         .n_experts = static_cast<std::uint32_t>(figures_.size()), .subject = {}, .reference = {},
                         .row_type = subject_.row_type(), .wire = wire_, .bad = {}};
    double worst_reference = 1;
    for (const ExpertFigures& f : figures_) {
      verdict.subject.add(f.subject);
      verdict.reference.add(f.reference);
      if (f.reference.n_values() > 0) worst_reference = std::min(worst_reference, f.reference.cosine());
    }
    for (const ExpertFigures& f : figures_) {
      std::optional<ExpertFault> fault;
      if (!f.finite) fault = ExpertFault::kNotFinite;
      else if (subject_.exact() && !f.same_bits) fault = ExpertFault::kBits;
      else if (f.subject.n_values() > 0 && !passes_gate(f.subject.cosine(), worst_reference)) fault = ExpertFault::kFar;
      if (fault) verdict.bad.push_back({f.expert, *fault, f.subject.cosine(), f.subject.max_abs()});
    }
    return verdict;
  }

 private:
  void travel(std::span<const float> row) {
    const wire::RowType type = subject_.row_type();
    if (type == wire::RowType::kF32) return;
    Bytes bytes(*wire::row_bytes(type, static_cast<std::uint32_t>(row.size())));
    std::vector<float> arrived(row.size());
    wire::encode_row(type, row, bytes);
    wire::decode_row(type, bytes, arrived);
    wire_.add(std::vector<double>(row.begin(), row.end()), arrived);
  }

  const gguf::MoeModel& model_;
  const gguf::LayerExperts& layer_;
  const wire::LayerId& id_;
  const LayerRows& rows_;
  Subject& subject_;
  ffn::Engine& engine_;
  std::uint32_t rows_per_expert_;
  std::vector<ExpertFigures> figures_;
  Agreement wire_;
};

}  // namespace

std::string_view to_string(ExpertFault fault) {
  switch (fault) {
    case ExpertFault::kBits: return "its bits differ from the exact answer's";
    case ExpertFault::kNotFinite: return "it is not finite where the exact answer is";
    case ExpertFault::kFar: return "it is further from the oracle than this CPU is";
  }
  return "";
}

LayerRows random_rows(const wire::Recipe& recipe, std::uint32_t n_rows, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  LayerRows rows{.recipe = recipe, .rows = std::vector<float>(std::size_t{n_rows} * recipe.n_embd), .routed = {}};
  for (float& value : rows.rows) value = normal(rng);
  return rows;
}

Result<std::vector<LayerVerdict>> check_experts(const gguf::MoeModel& model, Subject& subject, const ExpertsOptions& options) {
  KVASIR_TRY(model.require_expert_data());
  KVASIR_ASSIGN(ggml_backend_buffer_type_t cpu, cpu_buffer_type());
  KVASIR_ASSIGN(const std::unique_ptr<ffn::Engine> engine, ffn::Engine::create({}));
  std::vector<LayerVerdict> verdicts;
  std::uint64_t done = 0;
  for (const gguf::LayerExperts& layer : model.layers()) {
    if (options.progress) options.progress(done++, model.layers().size());
    if (options.layers && !options.layers->contains(layer.layer)) continue;
    KVASIR_ASSIGN(const wire::LayerId id, model.layer_id(layer));
    std::vector<std::uint32_t> experts;
    for (std::uint32_t expert : subject.experts(layer, id).ids())
      if (layer.held.contains(expert)) experts.push_back(expert);
    if (experts.empty()) continue;
    KVASIR_ASSIGN(const std::optional<LayerRows> rows, options.rows_of(layer, id));
    if (!rows) continue;
    LayerCheck check(model, layer, id, *rows, subject, *engine, options.rows_per_expert);
    const std::size_t step = experts_per_load(layer);
    for (std::size_t first = 0; first < experts.size(); first += step)
      KVASIR_TRY(check.add(std::span(experts).subspan(first, std::min(step, experts.size() - first)), cpu));
    verdicts.push_back(check.verdict());
  }
  return verdicts;
}

}  // namespace kvasir::verify
