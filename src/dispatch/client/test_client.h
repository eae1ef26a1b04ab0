// What the tests of the client share: a dispatcher over fake workers with one layer registered,
// its driver, and what it logged.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "dispatch/client/fake_worker.h"
#include "dispatch/dispatcher.h"

namespace kvasir::dispatch {

struct TestLayer {
  wire::LayerId id{};
  std::uint32_t width = 32, n_expert = 64;
};

inline std::unique_ptr<FakeWorker> make_worker(const TestLayer& layer, std::uint32_t begin, std::uint32_t end,
                                               const net::TlsIdentity* tls = nullptr) {
  ExpertSet set;
  set.add({begin, end});
  return std::make_unique<FakeWorker>(layer.id, set, layer.width, tls);
}

inline WorkerAddress at(const FakeWorker& worker, std::string id = {}) { return {"127.0.0.1", worker.port(), {}, std::move(id)}; }

struct TestClient {
  void start(const TestLayer& what, Options options) {
    options.log = [this](std::string line) {
      const MutexLock lock(mutex);
      lines.push_back(std::move(line));
    };
    auto made = Dispatcher::create(std::move(options));
    ASSERT_TRUE(made) << made.error().message;
    dispatcher = *std::move(made);
    wire::Recipe recipe;
    recipe.n_embd = what.width;
    recipe.n_ff = 8;
    recipe.n_expert = what.n_expert;
    layer = &dispatcher->register_layer(what.id, 5, recipe);
    driver = dispatcher->make_driver();
  }

  // A row's values, and the experts of each row: different ones, in a fixed pattern.
  void draw(std::uint32_t n_rows, std::size_t stride, float scale = 1) {
    rows.resize(n_rows * stride);
    for (float& value : rows) value = scale * std::uniform_real_distribution<float>(-1, 1)(rng);
  }
  void pick(std::uint32_t n_rows, std::uint32_t top_k, std::uint32_t step, std::uint32_t n_expert) {
    pairs.clear();
    for (std::uint32_t row = 0; row < n_rows; ++row)
      for (std::uint32_t k = 0; k < top_k; ++k) pairs.push_back({row, (row * 5 + k * step) % n_expert});
  }

  bool logged(std::string_view text) {
    const MutexLock lock(mutex);
    return std::ranges::any_of(lines, [&](const std::string& line) { return line.contains(text); });
  }
  template <typename Done>
  static bool wait_for(Done&& done, Nanos limit = std::chrono::seconds(20)) {
    for (const auto start = monotonic_now(); monotonic_now() - start < limit; std::this_thread::sleep_for(std::chrono::milliseconds(5)))
      if (done()) return true;
    return false;
  }
  Stats stats() const { return dispatcher->stats(); }

  Mutex mutex;
  std::vector<std::string> lines KVASIR_GUARDED_BY(mutex);
  std::unique_ptr<Dispatcher> dispatcher;
  std::unique_ptr<RoundDriver> driver;
  const Layer* layer = nullptr;
  std::vector<float> rows, out;
  std::vector<wire::Pair> pairs;
  std::mt19937 rng{1};
};

}  // namespace kvasir::dispatch
