#include "cli/verify_report.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <format>
#include <nlohmann/json.hpp>

#include "verify/recipes.h"

namespace kvasir::cli {
namespace {

using json = nlohmann::ordered_json;
using verify::Agreement;

// Bad experts that people are shown of one worker; JSON has all.
constexpr std::size_t kShownMax = 8;

std::string base_name(const std::string& path) { return std::filesystem::path(path).filename().string(); }
std::string group_suffix(gguf::ExpertGroup group) { return group == gguf::ExpertGroup::kExps ? "" : " chexps"; }

std::string number(double value) { return value == 0 ? "0" : std::format("{:.2g}", value); }
// Cosines near 1 differ in their last digits.
std::string cosine(double value) { return std::format("{:.9f}", value); }

json figures(const Agreement& a) {
  return {{"cosine", a.cosine()}, {"max_abs", a.max_abs()}, {"max_relative", a.max_relative()}, {"allclose_1e-3", a.all_close(verify::kRowsCloseTolerance)}};
}

struct SubjectSum {
  std::uint64_t n_experts = 0;
  std::size_t n_bad = 0;
  Agreement subject, reference, wire;
};
SubjectSum sum_of(const SubjectReport& report) {
  SubjectSum sum;
  for (const verify::LayerVerdict& layer : report.layers) {
    sum.n_experts += layer.n_experts;
    sum.n_bad += layer.bad.size();
    sum.subject.add(layer.subject);
    sum.reference.add(layer.reference);
    sum.wire.add(layer.wire);
  }
  return sum;
}

json to_json(const SubjectReport& report) {
  json layers = json::array();
  for (const verify::LayerVerdict& layer : report.layers) {
    json bad = json::array();
    for (const verify::BadExpert& b : layer.bad)
      bad.push_back({{"expert", b.expert}, {"why", verify::to_string(b.fault)}, {"cosine", b.cosine}, {"max_abs", b.max_abs}});
    layers.push_back({{"layer", layer.layer}, {"group", gguf::to_string(layer.group)}, {"recipe", verify::describe(layer.recipe)},
                      {"experts", layer.n_experts}, {"subject", figures(layer.subject)}, {"cpu", figures(layer.reference)},
                      {"gate", layer.near_enough()}, {"bad", std::move(bad)}});
    if (layer.wire.n_values() > 0) layers.back()["rows_alone"] = figures(layer.wire);
  }
  return {{"name", report.name}, {"exact", report.exact}, {"why_not_exact", report.why_not_exact}, {"accepted", report.passes()},
          {"layers", std::move(layers)}};
}

std::string verdict(const GateReport& report) {
  const auto n_refused = std::ranges::count_if(report.subjects, [](const SubjectReport& s) { return !s.passes(); });
  if (n_refused > 0) return std::format("REFUSED: {} of {} fail, see above.", n_refused, report.subjects.size());
  if (report.tokens && report.counters.pairs_remote == 0) return "REFUSED: llama.cpp got no expert's answer from them.";
  if (!report.tokens_pass())
    return report.exact() ? "REFUSED: the experts are right, and yet llama.cpp's logits are not the same bits."
                          : "REFUSED: near enough to the oracle, but not every most likely token is llama.cpp's.";
  if (report.exact()) return "Accepted: the same bits as llama.cpp.";
  return std::string("Accepted in fast numerics: as near to the oracle as this CPU") + (report.tokens ? ", and the same token most likely everywhere." : ".");
}

// Why a subject is refused, one line a reason.
void print_refusals(const SubjectReport& report) {
  std::size_t shown = 0, n_bad = 0;
  for (const verify::LayerVerdict& layer : report.layers) {
    for (const verify::BadExpert& b : layer.bad) {
      if (++n_bad > kShownMax) continue;
      ++shown;
      std::printf("    layer %u%s expert %u: %s (cosine %s, max|Δ| %s)\n", layer.layer, group_suffix(layer.group).c_str(), b.expert,
                  std::string(verify::to_string(b.fault)).c_str(), cosine(b.cosine).c_str(), number(b.max_abs).c_str());
    }
    if (layer.bad.empty() && !layer.near_enough())
      std::printf("    layer %u%s: cosine %s, where this CPU has %s\n", layer.layer, group_suffix(layer.group).c_str(),
                  cosine(layer.subject.cosine()).c_str(), cosine(layer.reference.cosine()).c_str());
  }
  if (n_bad > shown) std::printf("    and %zu more\n", n_bad - shown);
}

}  // namespace

bool SubjectReport::passes() const {
  return std::ranges::all_of(layers, [](const verify::LayerVerdict& layer) { return layer.passes(); });
}
bool GateReport::exact() const {
  return std::ranges::all_of(subjects, [](const SubjectReport& s) { return s.exact; });
}
bool GateReport::tokens_pass() const {
  if (!tokens) return true;
  return counters.pairs_remote > 0 && (exact() ? tokens->same_bits() : tokens->same_argmax());
}
bool GateReport::accepted() const {
  return tokens_pass() && std::ranges::all_of(subjects, [](const SubjectReport& s) { return s.passes(); });
}

bool print(const std::vector<OracleReport>& reports, bool as_json) {
  bool good = true;
  json out = json::array();
  for (const OracleReport& report : reports) {
    json layers = json::array();
    if (!as_json)
      std::printf("\n%s, %zu shards, float64\n\n  %-12s %16s %7s   %-23s %-23s\n  %-12s %16s %7s   %-11s %-11s %-11s %-11s %s\n",
                  base_name(report.file).c_str(), report.n_shards, "", "", "", "one row a pair", "partial sums", "layer",
                  "experts touched", "tokens", "max|Δ|", "relative", "max|Δ|", "relative", "allclose(1e-5)");
    std::uint64_t touched = 0, total = 0;
    Agreement per_pair, partial;
    for (const verify::ShardingLayer& layer : report.layers) {
      good = good && layer.passes();
      touched += layer.n_touched;
      total += layer.n_expert;
      per_pair.add(layer.per_pair);
      partial.add(layer.partial);
      const bool close = layer.per_pair.all_close(verify::kShardingCloseTolerance) && layer.partial.all_close(verify::kShardingCloseTolerance);
      layers.push_back({{"layer", layer.layer}, {"group", gguf::to_string(layer.group)}, {"experts", layer.n_expert},
                        {"experts_touched", layer.n_touched}, {"tokens", layer.n_tokens}, {"max_abs", layer.per_pair.max_abs()},
                        {"max_relative", layer.per_pair.max_relative()}, {"partial_max_abs", layer.partial.max_abs()},
                        {"partial_max_relative", layer.partial.max_relative()}, {"allclose_1e-5", close}, {"passes", layer.passes()}});
      if (!as_json)
        std::printf("  %-12s %16s %7u   %-10s %-11s %-10s %-11s %s\n", std::format("{}{}", layer.layer, group_suffix(layer.group)).c_str(),
                    std::format("{}/{}", layer.n_touched, layer.n_expert).c_str(), layer.n_tokens, number(layer.per_pair.max_abs()).c_str(),
                    number(layer.per_pair.max_relative()).c_str(), number(layer.partial.max_abs()).c_str(),
                    number(layer.partial.max_relative()).c_str(), layer.passes() ? "yes" : close ? "yes, but over 3.6e-12" : "NO");
    }
    if (!as_json)
      std::printf("\n  max|mono - sharded| %s, as partial sums %s; %llu of %llu experts touched\n", number(per_pair.max_abs()).c_str(),
                  number(partial.max_abs()).c_str(), static_cast<unsigned long long>(touched), static_cast<unsigned long long>(total));
    out.push_back({{"file", report.file}, {"shards", report.n_shards}, {"max_abs", per_pair.max_abs()}, {"partial_max_abs", partial.max_abs()},
                   {"experts_touched", touched}, {"experts", total}, {"layers", std::move(layers)}});
  }
  if (as_json) std::printf("%s\n", json{{"passes", good}, {"files", std::move(out)}}.dump(2).c_str());
  else std::printf("\n%s\n", good ? "The shards give the whole." : "REFUSED: the shards do not give the whole.");
  return good;
}

bool print(const GateReport& report, bool as_json) {
  const bool accepted = report.accepted();
  if (as_json) {
    json subjects = json::array();
    for (const SubjectReport& subject : report.subjects) subjects.push_back(to_json(subject));
    json out = {{"model", report.file}, {"verdict", accepted ? "accepted" : "refused"}, {"numerics", report.exact() ? "exact" : "fast"}};
    if (report.tokens)
      out["tokens"] = {{"prompts", report.n_prompts}, {"greedy", report.tokens->tokens}, {"greedy_same", report.tokens->tokens_same},
                       {"places", report.tokens->places}, {"argmax_same", report.tokens->argmax_same},
                       {"logit_cosine_min", report.tokens->cosine_min}, {"logprob_max_abs", report.tokens->max_abs},
                       {"pairs_remote", report.counters.pairs_remote}, {"pairs_local", report.counters.pairs_local},
                       {"passes", report.tokens_pass()}};
    out["subjects"] = std::move(subjects);
    std::printf("%s\n", out.dump(2).c_str());
    return accepted;
  }
  std::printf("\n%s: %s, %u layers, %u experts\n", base_name(report.file).c_str(), report.model->architecture().c_str(),
              report.model->n_layer(), report.model->n_expert());
  std::printf("\n  %-22s %7s  %5s  %-12s %-12s %-9s %-8s %-14s\n", "experts, one by one", "experts", "exact", "cosine", "of this CPU",
              "max|Δ|", "relative", "allclose(1e-3)");
  for (const SubjectReport& subject : report.subjects) {
    const SubjectSum sum = sum_of(subject);
    std::printf("  %-22s %7llu  %5s  %-12s %-12s %-8s %-8s %-14s %s\n", subject.name.c_str(), static_cast<unsigned long long>(sum.n_experts),
                subject.exact ? "yes" : "no", cosine(sum.subject.cosine()).c_str(), cosine(sum.reference.cosine()).c_str(),
                number(sum.subject.max_abs()).c_str(), number(sum.subject.max_relative()).c_str(), sum.subject.all_close(verify::kRowsCloseTolerance) ? "yes" : "no",
                subject.passes() ? "ok" : "REFUSED");
    if (sum.wire.n_values() > 0) std::printf("    rows as they travel, alone: cosine %s\n", cosine(sum.wire.cosine()).c_str());
    if (!subject.why_not_exact.empty()) std::printf("    not exact: %s\n", subject.why_not_exact.c_str());
    print_refusals(subject);
  }
  if (report.tokens) {
    const GateFigures& t = *report.tokens;
    std::printf("\n  %zu prompts, against llama.cpp --no-repack\n", report.n_prompts);
    std::printf("    greedy tokens identical   %llu/%llu%s\n", static_cast<unsigned long long>(t.tokens_same), static_cast<unsigned long long>(t.tokens),
                report.exact() ? "" : "  (not judged)");
    std::printf("    next token the same       %llu/%llu\n", static_cast<unsigned long long>(t.argmax_same), static_cast<unsigned long long>(t.places));
    std::printf("    logits                    cosine %s, max|Δ log p| %s\n", cosine(t.cosine_min).c_str(), number(t.max_abs).c_str());
    std::printf("    pairs                     %llu by workers, %llu here\n", static_cast<unsigned long long>(report.counters.pairs_remote),
                static_cast<unsigned long long>(report.counters.pairs_local));
  }
  std::printf("\n%s\n", verdict(report).c_str());
  return accepted;
}

}  // namespace kvasir::cli
