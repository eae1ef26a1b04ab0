#include "cli/bench_ceilings.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "base/clock.h"

// One function, compiled for the widest vectors the CPU may have and chosen when it loads.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define KVASIR_WIDEST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), optimize("O3")))
#else
#define KVASIR_WIDEST
#endif

namespace kvasir::cli {
namespace {

constexpr std::size_t kReadBytesPerThread = 192u << 20;
constexpr int kReadRounds = 4;
constexpr int kLanes = 16 * 12;  // enough chains to hide the latency of a multiply-add
constexpr int kFmaSteps = 2'000'000;

KVASIR_WIDEST std::uint64_t read_all(const std::uint64_t* data, std::size_t n) {
  std::uint64_t sums[32] = {};
  for (std::size_t i = 0; i + 32 <= n; i += 32)
    for (std::size_t k = 0; k < 32; ++k) sums[k] += data[i + k];
  std::uint64_t sum = 0;
  for (const std::uint64_t s : sums) sum += s;
  return sum;
}

KVASIR_WIDEST float multiply_add(int steps, float a, float b) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(i);
  for (int s = 0; s < steps; ++s)
    for (int i = 0; i < kLanes; ++i) lanes[i] = lanes[i] * a + b;
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

// Runs `body(thread)` on every thread at once; seconds until the last is done.
template <typename Body>
double on_threads(int n_threads, Body body) {
  std::vector<std::jthread> threads;
  std::atomic<int> ready = 0;
  std::atomic<bool> go = false;
  for (int t = 0; t < n_threads; ++t)
    threads.emplace_back([&, t] {
      ++ready;
      while (!go) std::this_thread::yield();
      body(t);
    });
  while (ready < n_threads) std::this_thread::yield();
  const TimePoint start = monotonic_now();
  go = true;
  threads.clear();
  return std::chrono::duration<double>(monotonic_now() - start).count();
}

}  // namespace

Ceilings measure_ceilings(int n_threads) {
  Ceilings ceilings;
  const std::size_t bytes = kReadBytesPerThread * static_cast<std::size_t>(n_threads);
  std::atomic<std::uint64_t> sink = 0;
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory != MAP_FAILED) {
    ::madvise(memory, bytes, MADV_HUGEPAGE);
    auto* words = static_cast<std::uint64_t*>(memory);
    std::fill_n(words, bytes / sizeof(std::uint64_t), 1u);
    constexpr std::size_t kWords = kReadBytesPerThread / sizeof(std::uint64_t);
    for (int round = 0; round < kReadRounds; ++round) {
      const double seconds = on_threads(n_threads, [&](int t) { sink += read_all(words + static_cast<std::size_t>(t) * kWords, kWords); });
      ceilings.read_gb_s = std::max(ceilings.read_gb_s, static_cast<double>(bytes) / seconds / 1e9);
    }
    ::munmap(memory, bytes);
  }
  for (int round = 0; round < 3; ++round) {
    const double seconds = on_threads(n_threads, [&](int t) {
      sink += static_cast<std::uint64_t>(multiply_add(kFmaSteps / 10, 0.999f, 0.001f + static_cast<float>(t)));
    });
    ceilings.fma_gflop_s = std::max(ceilings.fma_gflop_s, 2.0 * kLanes * (kFmaSteps / 10) * n_threads / seconds / 1e9);
  }
  return ceilings;
}

}  // namespace kvasir::cli
