// Ctrl-C for commands that start other processes: the first SIGINT or SIGTERM only sets a
// flag, so that the stack unwinds and every child and temporary file goes.
#pragma once

namespace kvasir::cli {

class InterruptGuard {
 public:
  InterruptGuard();   // one at a time
  ~InterruptGuard();  // the handlers that were there before
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;
};

bool interrupted();

}  // namespace kvasir::cli
