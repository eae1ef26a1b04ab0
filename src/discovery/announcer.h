// Announces a service from a child process, which speaks to the network so that nothing which
// comes from there can end this one.
#pragma once

#include <sys/types.h>

#include <memory>

#include "base/error.h"
#include "discovery/service.h"

namespace kvasir::discovery {

class Announcer {
 public:
  // Makes the child, which waits; before this process has threads, so that it is a whole one.
  static Result<std::unique_ptr<Announcer>> make();
  // Takes the announcement back, within moments. If this process dies the child sees it and does so.
  ~Announcer();
  Announcer(const Announcer&) = delete;
  Announcer& operator=(const Announcer&) = delete;

  // Once; where and what became known after the start.
  void announce(const Service& service);
  pid_t child() const { return child_; }

 private:
  Announcer(pid_t child, int pipe) : child_(child), pipe_(pipe) {}
  const pid_t child_;
  int pipe_;
};

}  // namespace kvasir::discovery
