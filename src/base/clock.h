// Time as the cores see it: nanoseconds on a monotonic clock, passed in, never read inside.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvasir {

using Nanos = std::chrono::nanoseconds;
// A point on the monotonic clock, since an arbitrary start.
using TimePoint = std::chrono::time_point<std::chrono::steady_clock, Nanos>;

inline TimePoint monotonic_now() { return std::chrono::steady_clock::now(); }

}  // namespace kvasir
