// HELLO: who may talk to this worker, and in which numerics.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "wire/messages.h"

namespace kvasir::worker {

// Nothing if the peer is welcome; else the ERROR it gets before the connection is closed.
// `token` empty: anyone may connect. The token is looked at first. `plain`: the weights lie as
// classes exact and invariant need them.
std::optional<wire::ErrorMessage> refuse_hello(const wire::Hello& peer, const wire::NumericsId& ours,
                                               std::string_view token, bool plain = true);

// Which field of the numerics ids differs, as a sentence; empty if none does.
std::string describe_difference(const wire::NumericsId& ours, const wire::NumericsId& theirs);

// Takes the same time wherever the texts differ; reveals at most their lengths.
bool equal_in_constant_time(std::string_view a, std::string_view b);

}  // namespace kvasir::worker
