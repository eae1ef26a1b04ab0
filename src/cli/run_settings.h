// What `kvasir run` tells llama-server and the plugin, from its own options, the environment
// and the flags the user gives to llama-server, which always win.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "net/connect.h"

namespace kvasir::cli {

struct RunOptions {
  std::string model;
  std::string hub, token, token_file, ca_file;  // of a hub…
  std::string workers;                          // …or links
  std::string numerics, local, replica;         // empty: the plugin's defaults
  std::string listen;                           // "[HOST:]PORT"
  bool show = false;                            // print the command instead of running it
  std::vector<std::string> extra;               // for llama-server
};

struct RunSettings {
  std::vector<std::string> args;                   // of llama-server
  std::map<std::string, std::string> environment;  // on top of this process's
  std::vector<std::string> unset;                  // and without these
  std::string scheme = "http", prefix;
  net::HostPort listen;      // where it will listen…
  std::string socket;        // …or the unix socket
  std::vector<std::string> notes;  // lines for the user: what was chosen, and why
};

// Reads the model's header, asks the hub, and looks whether workers share this machine.
Result<RunSettings> decide_run(const RunOptions& options);

}  // namespace kvasir::cli
