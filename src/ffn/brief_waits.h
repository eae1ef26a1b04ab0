// How ggml's threads wait for each other: by libgomp's rules, read from the environment when it
// is loaded. By default they spin for milliseconds, which takes the cores from whoever else
// computes on the machine; with OMP_WAIT_POLICY=passive they sleep at once, though most of
// ggml's operations are shorter than a wake-up. A spin of some microseconds is faster than
// either (docs/performance.md).
#pragma once

#include <map>
#include <string>

namespace kvasir::ffn {

inline constexpr const char* kWaitPolicyVariable = "OMP_WAIT_POLICY";
inline constexpr const char* kSpinCountVariable = "GOMP_SPINCOUNT";  // libgomp's own; overrides its policy
inline constexpr const char* kBriefWaitPolicy = "passive";           // for other OpenMP libraries
inline constexpr const char* kBriefSpinCount = "1000";

// For a child process.
inline void add_brief_waits(std::map<std::string, std::string>& environment) {
  environment[kWaitPolicyVariable] = kBriefWaitPolicy;
  environment[kSpinCountVariable] = kBriefSpinCount;
}

// For this process, unless the user has a setting of his own. libgomp comes with ggml and has read
// the environment before main(), so the program is started anew in its place (execv; same process,
// same arguments): call it first of all, before any thread. Where that fails all stays as it is.
void wait_briefly();

}  // namespace kvasir::ffn
