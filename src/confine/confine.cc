#include "confine/confine.h"

#include <sys/prctl.h>
#include <sys/resource.h>

#include <format>

namespace kvasir::confine {
namespace {

// The leak checker of the sanitizers traces its own process at the end, and their reports start a program.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

bool forbid_dumps() {
  const rlimit none{0, 0};
  return ::setrlimit(RLIMIT_CORE, &none) == 0 && ::prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0;
}

}  // namespace

std::string confine(const Needs& needs) {
  if (kSanitized) return "not confined: built with a sanitizer";
  std::string done, missing;
  const auto note = [&](const char* what, const std::optional<std::string>& why_not) {
    if (!why_not) done += std::format("{}{}", done.empty() ? "" : ", ", what);
    else missing += std::format("{}{} ({})", missing.empty() ? "" : ", ", what, *why_not);
  };
  const auto failed = [](bool right) { return right ? std::nullopt : std::optional<std::string>("the kernel refuses"); };
  note("no core dumps", failed(forbid_dumps()));
  // Before the others, which want it of everyone but root.
  note("no new privileges", failed(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0));
  note("files", confine_files(needs));
  note("system calls", confine_system_calls(needs.gpu, needs.child));
  return std::format("confined: {}{}{}", done.empty() ? "nothing" : done, missing.empty() ? "" : "; not: ", missing);
}

}  // namespace kvasir::confine
