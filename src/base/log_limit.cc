#include "base/log_limit.h"

#include <algorithm>
#include <format>
#include <memory>
#include <utility>

namespace kvasir {

std::optional<std::string> LogLimit::take(TimePoint now) {
  const MutexLock lock(mutex_);
  const TimePoint paid = std::max(paid_until_, now) + kLogLineEvery;
  if (paid > now + kLogLinesAtOnce * kLogLineEvery) {
    ++left_out_;
    return std::nullopt;
  }
  paid_until_ = paid;
  const std::uint64_t left_out = std::exchange(left_out_, 0);
  return left_out == 0 ? "" : std::format(" ({} lines before this one were left out)", left_out);
}

LogFunction limited_log(LogFunction log) {
  return [log = std::move(log), limit = std::make_shared<LogLimit>()](const std::string& line) {
    if (const auto note = limit->take(monotonic_now())) log(line + *note);
  };
}

}  // namespace kvasir
