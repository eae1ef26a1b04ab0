// Virtual time: events run in order of time, then of scheduling, so that a seed replays.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <queue>
#include <string>
#include <vector>

#include "base/clock.h"
#include "dispatch/core/rng.h"

namespace kvasir::sim {

using dispatch::Rng;

class World {
 public:
  static constexpr std::uint64_t kStepsMax = 5'000'000;  // some twenty times a long run

  World(std::uint64_t seed, bool verbose) : rng(seed), verbose_(verbose) {}

  TimePoint now() const { return now_; }
  void at(TimePoint when, std::function<void()> what) { events_.push({std::max(when, now_), ++sequence_, std::move(what)}); }
  void after(Nanos delay, std::function<void()> what) { at(now_ + delay, std::move(what)); }

  // Runs until nothing is left, `stop` says so, or a check has failed.
  void run(const std::function<bool()>& stop) {
    while (!events_.empty() && !failed() && !stop()) {
      Event event = events_.top();
      events_.pop();
      now_ = event.when;
      ++steps_;
      event.what();
      if (steps_ > kStepsMax) fail("the run does not come to an end");
    }
  }

  bool chance(double p) { return rng.unit() < p; }
  Nanos between(Nanos low, Nanos high) {
    return low + Nanos(static_cast<std::int64_t>(rng.unit() * static_cast<double>((high - low).count())));
  }

  // The first failure is kept.
  void fail(std::string why) {
    if (failure_.empty()) failure_ = std::move(why);
    trace("FAILED: %s", failure_.c_str());
  }
  bool failed() const { return !failure_.empty(); }
  const std::string& failure() const { return failure_; }
  std::uint64_t steps() const { return steps_; }

  [[gnu::format(printf, 2, 3)]] void trace(const char* format, ...) const {
    if (!verbose_) return;
    std::printf("%12.3f ms  ", static_cast<double>(now_.time_since_epoch().count()) / 1e6);
    va_list args;
    va_start(args, format);
    std::vprintf(format, args);
    va_end(args);
    std::putchar('\n');
  }

  Rng rng;

 private:
  struct Event {
    TimePoint when;
    std::uint64_t sequence;
    std::function<void()> what;
    bool operator<(const Event& other) const {  // the queue's top is the largest
      return when != other.when ? when > other.when : sequence > other.sequence;
    }
  };

  const bool verbose_;
  TimePoint now_{};
  std::uint64_t sequence_ = 0, steps_ = 0;
  std::priority_queue<Event> events_;
  std::string failure_;
};

}  // namespace kvasir::sim
