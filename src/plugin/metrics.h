// The plugin's counters for Prometheus; docs/metrics.md has the list.
#pragma once

#include <cstdint>
#include <string>

#include "dispatch/dispatcher.h"

namespace kvasir::plugin {

std::string metrics_text(const dispatch::Stats& stats, std::uint64_t local_splits);

}  // namespace kvasir::plugin
