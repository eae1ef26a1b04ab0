#include "ffn/crew.h"

#include <algorithm>

#include "base/clock.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvasir::ffn {
namespace {

constexpr std::uint32_t kOnePlace = 1u << 16;
constexpr std::uint32_t kBegunMask = kOnePlace - 1;
// After a piece of work the next often follows at once; a sleeping thread takes about as long to
// wake. Short, so that an idle machine stays cool.
constexpr Nanos kHelperSpin = std::chrono::microseconds(30);
// The others end at about the same time, unless the machine gave their core to somebody else.
constexpr Nanos kOwnerSpin = std::chrono::microseconds(30);

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <typename Done>
bool spin(Nanos limit, const Done& done) {
  const TimePoint until = monotonic_now() + limit;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      relax();
    }
  } while (monotonic_now() < until);
  return false;
}

}  // namespace

Crew::Crew(std::uint32_t n_helpers) {
  threads_.reserve(n_helpers);
  for (std::uint32_t i = 1; i <= n_helpers; ++i) threads_.emplace_back([this, i] { help(i); });
}

Crew::~Crew() {
  stop_ = true;
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Crew::begin(std::uint32_t n_helpers, Call call, void* context) {
  n_helpers = std::min(n_helpers, this->n_helpers());
  if (n_helpers == 0) return;
  call_ = call;
  context_ = context;
  places_.store(n_helpers * kOnePlace, std::memory_order_release);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
}

void Crew::end() {
  std::uint32_t left = places_.fetch_and(kBegunMask, std::memory_order_acq_rel) & kBegunMask;
  if (left == 0) return;
  spin(kOwnerSpin, [&] { return (left = places_.load(std::memory_order_acquire)) == 0; });
  while (left != 0) {
    places_.wait(left, std::memory_order_acquire);
    left = places_.load(std::memory_order_acquire);
  }
}

void Crew::wait_for_change(std::uint32_t seen) const {
  const auto changed = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
  if (!spin(kHelperSpin, changed)) epoch_.wait(seen, std::memory_order_acquire);
}

void Crew::help(std::uint32_t i) {
  for (std::uint32_t seen = 0;;) {
    wait_for_change(seen);
    seen = epoch_.load(std::memory_order_acquire);
    if (stop_) return;
    std::uint32_t places = places_.load(std::memory_order_relaxed);
    bool begun = false;
    while (places >= kOnePlace && !begun)
      begun = places_.compare_exchange_weak(places, places - kOnePlace + 1, std::memory_order_acquire);
    if (!begun) continue;
    call_(context_, i);
    if (places_.fetch_sub(1, std::memory_order_acq_rel) == 1) places_.notify_one();
  }
}

}  // namespace kvasir::ffn
