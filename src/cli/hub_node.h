// kvasir-hub node …: the nodes of a running hub, over its API with an admin's token.
#pragma once

namespace CLI {
class App;
}

namespace kvasir::cli {

void configure_hub_nodes(CLI::App& app, int& exit_code);

}  // namespace kvasir::cli
