// Multicast DNS by Avahi's embeddable library, which needs no daemon.
//
// Its parser meets whatever anybody on the network sends, and ends the process where it does not
// know how to go on. Only in a child that may end: see Announcer and find_services.
#pragma once

#include <functional>
#include <vector>

#include "base/clock.h"
#include "discovery/service.h"

namespace kvasir::discovery {

// Says on every network of this machine that the service is here (its host is what it listens
// on), until `go_on` is false; it is asked several times a second.
Status announce(const Service& service, const std::function<bool()>& go_on);
// Hubs and workers that answer within that time.
Result<std::vector<Service>> find(Nanos time);

}  // namespace kvasir::discovery
