// What a worker has done for whom, until somebody takes it to the hub. Any thread.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "base/mutex.h"

namespace kvasir::worker {

struct Service {
  std::uint64_t pairs = 0, rows = 0, bytes = 0;  // bytes: of requests and answers, without frames' heads
  Service& operator+=(const Service& other) {
    pairs += other.pairs;
    rows += other.rows;
    bytes += other.bytes;
    return *this;
  }
};

class ServedLedger {
 public:
  static constexpr std::size_t kBackbonesMax = 4096;  // past it a newcomer's service has no name

  // By token id of the backbone; empty: one that did not say who it is.
  using ByBackbone = std::map<std::string, Service>;

  void add(const std::string& backbone, const Service& service) {
    const MutexLock lock(mutex_);
    const bool room = served_.size() < kBackbonesMax || served_.contains(backbone);
    served_[room ? backbone : std::string()] += service;
  }
  ByBackbone take() {
    const MutexLock lock(mutex_);
    return std::exchange(served_, {});
  }

 private:
  Mutex mutex_;
  ByBackbone served_ KVASIR_GUARDED_BY(mutex_);
};

}  // namespace kvasir::worker
