// What `kvasir verify` found, for people and as JSON.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/verify_gate.h"
#include "verify/experts.h"
#include "verify/sharding.h"

namespace kvasir::cli {

inline constexpr int kExitRefused = 2;  // the verdict, where kExitFailed is that there is none

struct OracleReport {
  std::string file;
  std::size_t n_shards = 0;
  std::vector<verify::ShardingLayer> layers;
};

struct SubjectReport {
  std::string name;
  bool exact = false;
  std::string why_not_exact;
  std::vector<verify::LayerVerdict> layers;
  bool passes() const;
};

struct GateReport {
  std::string file;
  const gguf::MoeModel* model = nullptr;
  std::vector<SubjectReport> subjects;
  std::size_t n_prompts = 0;
  std::optional<GateFigures> tokens;
  DemoCounters counters;

  bool exact() const;     // every subject claims the reference's bits
  // Tokens: in exact numerics every bit, else the most likely token after each given text. Greedy
  // texts are not judged then: one near tie that falls otherwise makes another text of all that follows.
  bool tokens_pass() const;
  bool accepted() const;
};

// Print, and say whether everything passed.
bool print(const std::vector<OracleReport>& reports, bool json);
bool print(const GateReport& report, bool json);

}  // namespace kvasir::cli
