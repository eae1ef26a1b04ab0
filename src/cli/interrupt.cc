#include "cli/interrupt.h"

#include <array>
#include <csignal>

namespace kvasir::cli {
namespace {

volatile std::sig_atomic_t g_interrupted = 0;
constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP};
std::array<struct sigaction, kSignals.size()> g_before{};

extern "C" void note_interrupt(int) { g_interrupted = 1; }

}  // namespace

InterruptGuard::InterruptGuard() {
  struct sigaction action{};
  action.sa_handler = note_interrupt;  // without SA_RESTART: a blocking call returns at once
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &action, &g_before[i]);
}

InterruptGuard::~InterruptGuard() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &g_before[i], nullptr);
}

bool interrupted() { return g_interrupted != 0; }

}  // namespace kvasir::cli
