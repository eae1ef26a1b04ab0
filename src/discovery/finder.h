// Who is on the local network, asked from a child process (see announcer.h).
#pragma once

#include <vector>

#include "base/clock.h"
#include "discovery/service.h"

namespace kvasir::discovery {

// Answers come within some hundred milliseconds; a lost packet is asked for again after a second.
inline constexpr Nanos kFindTime = std::chrono::milliseconds(2500);

Result<std::vector<Service>> find_services(Nanos time = kFindTime);

}  // namespace kvasir::discovery
