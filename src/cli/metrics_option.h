// --metrics PORT|FILE of the commands that serve: a small port for a scraper, or a text file
// for a collector that reads a folder.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/error.h"
#include "net/text_server.h"

namespace kvasir::cli {

inline constexpr const char* kMetricsHelp =
    "figures for Prometheus: [HOST:]PORT to be asked at (loopback unless HOST is given), or a FILE rewritten each "
    "second";

// "9100", ":9100" and "HOST:9100" are a port; everything else is a file's name.
bool is_metrics_port(const std::string& option);

// Where `option` is a port, serves what `text` gives; null where it is empty or a file.
Result<std::unique_ptr<net::TextServer>> serve_metrics(const std::string& option, std::function<std::string()> text);

}  // namespace kvasir::cli
