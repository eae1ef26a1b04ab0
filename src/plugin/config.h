// The plugin's settings, from KVASIR_* environment variables or a file of the same names
// (KVASIR_CONFIG: JSON object, e.g. {"KVASIR_WORKERS": "a:7070,b:7070"}). The environment
// wins. docs/configuration.md has the table; the list of names here is what it must match.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "dispatch/dispatcher.h"
#include "hub/client/hub_client.h"

namespace kvasir::plugin {

// Where the backbone keeps the experts it can fall back to.
enum class Replica {
  kMmap,  // the model file's own pages, read from disk when first touched
  kRam,   // a copy in memory, made while loading
  kNone,  // nowhere: only workers compute experts
};

struct Config {
  dispatch::Options dispatch;
  std::optional<hub::HubAddress> hub;  // instead of a list of workers
  Replica replica = Replica::kMmap;
  bool overlap = false;  // the shared expert is computed while answers are on their way
  bool upload = false;  // hand workers the experts that none holds
  bool stats_at_exit = false;
  std::string stats_file;    // empty: none
  std::string metrics_file;  // empty: none
};

struct Variable {
  std::string_view name;
  std::string_view values;   // for the table and for errors
  std::string_view meaning;
};
std::span<const Variable> variables();

// `get(name)`: the environment's value or nullopt. `present`: every KVASIR_ name set there,
// for the warning about unknown ones (appended to `warnings`).
Result<Config> load_config(const std::function<std::optional<std::string>(std::string_view)>& get,
                           std::span<const std::string> present, std::vector<std::string>& warnings);

// The same over the process environment.
Result<Config> load_config_from_environment(std::vector<std::string>& warnings);

}  // namespace kvasir::plugin
