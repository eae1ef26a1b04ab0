// What a daemon gives up for good once it knows its files, so that whoever takes it over has little:
//   - files: only what is named here and what every program reads may be opened (landlock);
//   - system calls: no program can be started, no process traced or signalled, no namespace, mount or
//     kernel interface reached (seccomp);
//   - new privileges, and dumps of memory that hold tokens and other people's activations.
// It holds for the calling thread and those it starts from then on: call it before the first thread.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"

namespace kvasir::confine {

struct Needs {
  std::vector<std::filesystem::path> read;   // files, or folders with all that is in them
  std::vector<std::filesystem::path> write;  // folders, which must exist by now; what is missing is skipped
  bool gpu = false;                          // device files, and what drivers read
  pid_t child = 0;                           // one that is there already, and may be ended
};

// What was done, for one line of the log. What the kernel does not have is left out, and the line says so.
std::string confine(const Needs& needs);

// The parts of it; an empty result or a reason why not.
std::optional<std::string> confine_files(const Needs& needs);
std::optional<std::string> confine_system_calls(bool gpu, pid_t child = 0);

}  // namespace kvasir::confine
