// The hubs and workers of the local network, for commands that were not told where one is.
#pragma once

#include <string>
#include <vector>

#include "base/error.h"
#include "discovery/service.h"

namespace kvasir::cli {

// Which hub to use when none was named. A token goes only to a hub that somebody vouches for: who
// announces itself on a network may be anybody, with a certificate of its own that is in order. So
// one is taken only where the caller has that hub's certificate (--ca-file); else the error lists
// what there is to choose from.
Result<std::string> choose_hub(const std::vector<discovery::Service>& found, const std::string& ca_file);
// The same after a look at the network. Before this process has threads.
Result<std::string> find_hub(const std::string& ca_file);

}  // namespace kvasir::cli
