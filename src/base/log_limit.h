// A bound for lines of a log that strangers can cause: so many at once, then so many a second. What is
// left out is counted, and said with the next line that is written.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/mutex.h"

namespace kvasir {

inline constexpr std::uint32_t kLogLinesAtOnce = 60;
inline constexpr Nanos kLogLineEvery = std::chrono::seconds(1);

// Thread-safe.
class LogLimit {
 public:
  // What to append to the line, usually ""; nothing if the line is to be left out.
  std::optional<std::string> take(TimePoint now);

 private:
  Mutex mutex_;
  // Every line puts this off by kLogLineEvery; it may lie so many lines ahead of now.
  TimePoint paid_until_ KVASIR_GUARDED_BY(mutex_){};
  std::uint64_t left_out_ KVASIR_GUARDED_BY(mutex_) = 0;
};

using LogFunction = std::function<void(const std::string&)>;
// The same log within that bound.
LogFunction limited_log(LogFunction log);

}  // namespace kvasir
