// kvasir-jitter-rounds: what a round costs beyond the network, over workers behind a jittering network.
//
// The real client against eight workers that compute next to nothing, through a proxy in this
// process that knows how long it held every answer. A round is compared with the largest delay
// among the answers that had reached the client when it ended. Without replicas each expert is on
// one worker, with them on two. One JSON object a line.
#include <sys/eventfd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "base/check.h"
#include "dispatch/client/fake_worker.h"
#include "dispatch/dispatcher.h"
#include "network.h"

namespace {

using namespace kvasir;
using namespace std::chrono_literals;

constexpr std::uint32_t kWorkers = 8, kExperts = 64, kTopK = 8, kWidth = 1024;
constexpr std::size_t kAnswerBytesMin = kWidth * sizeof(float);  // anything shorter is a ping's answer
constexpr Nanos kRoundTrip = 30ms, kJitter = 5ms;

struct Held {
  std::size_t worker;
  TimePoint due;
  Nanos delay;  // both ways
};

double ms(Nanos t) { return static_cast<double>(t.count()) / 1e6; }

double quantile(std::vector<double> values, double q) {
  std::ranges::sort(values);
  return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1))];
}

void measure(std::uint32_t replicas, int n_rounds) {
  std::vector<std::unique_ptr<dispatch::FakeWorker>> workers;
  std::vector<std::uint16_t> ports;
  for (std::uint32_t w = 0; w < kWorkers; ++w) {
    std::vector<std::uint32_t> ids;
    for (std::uint32_t e = 0; e < kExperts; ++e)
      for (std::uint32_t r = 0; r < replicas; ++r)
        if ((e + 3 * r) % kWorkers == w) ids.push_back(e);
    workers.push_back(std::make_unique<dispatch::FakeWorker>(wire::LayerId{}, ExpertSet::from_ids(ids), kWidth));
    ports.push_back(workers.back()->port());
  }
  bench::Network network;
  network.half = kRoundTrip / 2;
  network.jitter = kJitter;
  bench::Proxy proxy(network, ports);
  std::mutex mutex;
  std::vector<Held> held;
  proxy.on_held([&](std::size_t worker, std::size_t bytes, TimePoint due, Nanos back) {
    if (bytes < kAnswerBytesMin) return;
    const std::lock_guard lock(mutex);
    held.push_back({worker, due, network.half + back});
  });
  const net::Fd stop(::eventfd(0, EFD_CLOEXEC));
  dispatch::Options options;
  for (std::uint16_t port : proxy.ports()) options.workers.push_back({"127.0.0.1", port, {}});
  std::thread carrier([&] { KVASIR_CHECK(proxy.run_until_readable(stop.get())); });

  options.local = dispatch::LocalPolicy::kNever;
  {
    auto dispatcher = dispatch::Dispatcher::create(std::move(options)).value();
    wire::Recipe recipe;
    recipe.n_embd = kWidth;
    recipe.n_ff = 8;
    recipe.n_expert = kExperts;
    const dispatch::Layer& layer = dispatcher->register_layer({}, 0, recipe);
    auto driver = dispatcher->make_driver();
    const std::vector<float> row(kWidth, 0.5f);
    std::vector<float> out(std::size_t{kTopK} * kWidth);
    std::mt19937 random(7);
    std::vector<double> took, over;
    double addressed = 0;
    int few = 0;
    constexpr int kWarmUp = 60;  // until what an answer takes is known
    for (int i = 0; i < n_rounds + kWarmUp; ++i) {
      std::set<std::uint32_t> experts;
      while (experts.size() < kTopK) experts.insert(static_cast<std::uint32_t>(random() % kExperts));
      std::vector<wire::Pair> pairs;
      for (std::uint32_t e : experts) pairs.push_back({0, e});
      const dispatch::Round round{.layer = &layer, .rows = row.data(), .row_stride = kWidth, .n_rows = 1, .pairs = pairs, .out = out.data()};
      const TimePoint start = monotonic_now();
      KVASIR_CHECK(driver->run(round, [](const dispatch::Round&, std::span<const std::uint32_t>) -> Status { return fatal("not expected"); }).has_value());
      const TimePoint end = monotonic_now();
      for (std::size_t k = 0; k < pairs.size(); ++k) KVASIR_CHECK(out[k * kWidth] == dispatch::fake_expert(0.5f, pairs[k].expert));
      if (i < kWarmUp) continue;
      Nanos largest{};
      std::set<std::size_t> answered;
      const std::lock_guard lock(mutex);
      for (const Held& h : held) {
        if (h.due < start || h.due > end) continue;
        largest = std::max(largest, h.delay);
        answered.insert(h.worker);
      }
      std::erase_if(held, [&](const Held& h) { return h.due <= end; });
      if (answered.size() < 4) {
        ++few;
        continue;
      }
      addressed += static_cast<double>(answered.size());
      took.push_back(ms(end - start));
      over.push_back(ms(end - start - largest));
    }
    const dispatch::Stats stats = dispatcher->stats();
    std::printf(R"({"row":"30 ms ± 5, %u workers, %u replicas","rounds":%zu,"answers_mean":%.1f,"fewer_than_4":%d,"round_ms_p50":%.2f,"round_ms_p99":%.2f,"over_largest_delay_ms_p50":%.3f,"over_largest_delay_ms_p99":%.3f,"hedges":%llu})" "\n",
                kWorkers, replicas, took.size(), addressed / static_cast<double>(took.size()), few, quantile(took, 0.5), quantile(took, 0.99),
                quantile(over, 0.5), quantile(over, 0.99), static_cast<unsigned long long>(stats.hedges));
    std::fflush(stdout);
    driver.reset();
  }
  ::eventfd_write(stop.get(), 1);
  carrier.join();
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 1000;
  measure(2, rounds);
  measure(1, rounds);
}
