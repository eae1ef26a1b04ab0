// One line at the foot of a log that says what goes on now. Silent where stderr is no terminal.
#pragma once

#include <functional>
#include <string>

#include "base/mutex.h"

namespace kvasir::cli {

class LiveLine {
 public:
  explicit LiveLine(bool wanted);
  ~LiveLine();  // wipes the line
  LiveLine(const LiveLine&) = delete;
  LiveLine& operator=(const LiveLine&) = delete;

  bool shown() const { return shown_; }
  // Any thread.
  void show(const std::string& text);
  // Writes something else above it.
  void above(const std::function<void()>& write);

 private:
  void wipe();
  void draw() KVASIR_REQUIRES(mutex_);

  const bool shown_;
  Mutex mutex_;
  std::string text_ KVASIR_GUARDED_BY(mutex_);
};

}  // namespace kvasir::cli
