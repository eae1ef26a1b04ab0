#include "cli/console.h"

#include <unistd.h>

#include <array>
#include <cstdio>
#include <format>
#include <string_view>

namespace kvasir::cli {
namespace {

constexpr int kBarWidth = 30;
constexpr std::chrono::milliseconds kRedrawInterval{100};

}  // namespace

int report(const Error& error) {
  std::fprintf(stderr, "kvasir: %s\n", error.message.c_str());
  return kExitFailed;
}

int report(const Status& status) { return status ? kExitOk : report(status.error()); }

std::string format_bytes(std::uint64_t bytes) {
  constexpr std::array<std::string_view, 5> kUnits = {"B", "kB", "MB", "GB", "TB"};
  if (bytes < 1000) return std::format("{} B", bytes);
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  return std::format("{:.{}f} {}", value, value < 99.95 ? 1 : 0, kUnits[unit]);
}

ProgressBar::ProgressBar(std::string what)
    : what_(std::move(what)),
      shown_(::isatty(STDERR_FILENO) == 1),
      start_(std::chrono::steady_clock::now()),
      next_(start_ + kRedrawInterval) {}

ProgressBar::~ProgressBar() {
  if (shown_) std::fputs("\r\033[K", stderr);
}

void ProgressBar::update(std::uint64_t done, std::uint64_t total) {
  if (!shown_ || total == 0) return;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return;
  next_ = now + kRedrawInterval;
  const double fraction = static_cast<double>(done) / static_cast<double>(total);
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const int filled = static_cast<int>(fraction * kBarWidth);
  std::string bar;
  for (int i = 0; i < kBarWidth; ++i) bar += i < filled ? "█" : "░";
  std::fprintf(stderr, "\r\033[K%s %s %3.0f %%  %s of %s  %s/s", what_.c_str(), bar.c_str(), fraction * 100,
               format_bytes(done).c_str(), format_bytes(total).c_str(),
               format_bytes(static_cast<std::uint64_t>(static_cast<double>(done) / seconds)).c_str());
  std::fflush(stderr);
}

}  // namespace kvasir::cli
