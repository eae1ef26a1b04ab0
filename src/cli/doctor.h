// The parts of `kvasir doctor`. Each looks at one thing and tells, in sentences, what it found
// and what to do about it.
#pragma once

#include <chrono>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "base/error.h"

namespace kvasir::cli {

enum class Grade {
  kGood,
  kNote,  // works, but not as well as it could
  kBad,   // does not work
};

struct Finding {
  Grade grade = Grade::kGood;
  std::string subject;   // "memory", "worker 10.0.0.2:7070"
  std::string sentence;  // what it is and, unless it is good, what to do
};
using Findings = std::vector<Finding>;

// Processor, memory, huge pages, load.
void examine_machine(Findings& findings);
// llama-server on PATH, and whether it loads the plugin with this environment's settings.
void examine_llama(Findings& findings);
// Whether each worker ("host:port[#fingerprint],…") answers, how far it is, what it holds, and
// whether it computes the same numbers as this machine.
// (or need not: `fast`).
Status examine_workers(const std::string& workers, const std::string& token, bool fast, Findings& findings);
// Who announces itself on the local network. Before this process has threads.
void examine_lan(Findings& findings);
// A hub's health and version.
void examine_hub(const std::string& url, const std::string& ca_file, Findings& findings);

// What holds a running server up: the file of KVASIR_STATS_FILE, read twice.
Status examine_server(const std::filesystem::path& stats_file, std::chrono::milliseconds pause, Findings& findings);
// The same of two readings.
void diagnose(const nlohmann::json& before, const nlohmann::json& after, double seconds, Findings& findings);

}  // namespace kvasir::cli
