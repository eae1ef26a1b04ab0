#include "cli/live_line.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>

namespace kvasir::cli {
namespace {

constexpr std::size_t kColumnsDefault = 80;

std::size_t columns() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kColumnsDefault;
}

// At most `n` characters of UTF-8 text: a line that wraps could not be wiped.
std::string clip(const std::string& text, std::size_t n) {
  std::size_t at = 0;
  for (; at < text.size(); ++at)
    if ((static_cast<unsigned char>(text[at]) & 0xc0) != 0x80 && n-- == 0) break;
  return text.substr(0, at);
}

}  // namespace

LiveLine::LiveLine(bool wanted) : shown_(wanted && ::isatty(STDERR_FILENO) == 1) {}

LiveLine::~LiveLine() { wipe(); }

void LiveLine::show(const std::string& text) {
  const MutexLock lock(mutex_);
  if (text == text_) return;
  text_ = text;
  wipe();
  draw();
}

void LiveLine::above(const std::function<void()>& write) {
  const MutexLock lock(mutex_);
  wipe();
  write();
  draw();
}

void LiveLine::wipe() {
  if (shown_) std::fputs("\r\033[K", stderr);
}

void LiveLine::draw() {
  if (!shown_ || text_.empty()) return;
  std::fputs(clip(text_, columns() - 1).c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace kvasir::cli
