// What the commands share at the terminal: errors, numbers for people, a progress bar.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "base/error.h"

namespace kvasir::cli {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;

// Prints the sentence to stderr; the exit status that goes with it.
int report(const Error& error);
int report(const Status& status);

// "17.1 MB", decimal units.
std::string format_bytes(std::uint64_t bytes);

// A bar on stderr, redrawn a few times a second; silent where stderr is no terminal.
class ProgressBar {
 public:
  explicit ProgressBar(std::string what);
  ~ProgressBar();  // wipes the line
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void update(std::uint64_t done, std::uint64_t total);

 private:
  std::string what_;
  bool shown_;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point next_;
};

}  // namespace kvasir::cli
