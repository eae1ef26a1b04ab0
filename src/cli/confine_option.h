// How the daemons confine themselves (confine/confine.h), and the flag that leaves it out.
#pragma once

#include <sys/types.h>

#include <string>

#include "confine/confine.h"

namespace CLI {
class App;
}

namespace kvasir::cli {

// --no-confine.
void add_confine_option(CLI::App& command, bool& off);

// Of one daemon: collects what its options name, then gives up the rest.
class Confinement {
 public:
  void reads(const std::string& path);        // a file or a folder; nothing for ""
  void reads_model(const std::string& path);  // and the other parts of a split one
  void keeps(const std::string& folder);      // what it may write in; made, readable by its owner only
  void rewrites(const std::string& file);     // written aside and renamed, so that its folder is written in
  void computes_on(const std::string& device);
  void ends(pid_t child);                     // a child that is there already

  // Before the first thread. What was done, for a line of the log once the daemon serves.
  std::string enforce(bool off) const;

 private:
  confine::Needs needs_;
};

}  // namespace kvasir::cli
