// What all connections of a server share: limits, counters, the threads that may block, and
// the list of connections with their deadlines. Inside the server only.
#pragma once

#include <atomic>
#include <boost/asio.hpp>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/log_limit.h"
#include "base/mutex.h"
#include "hub/http/server.h"
#include "hub/relay/relay.h"

namespace kvasir::hub {

namespace asio = boost::asio;

// A connection as the server's watchman sees it. Deadlines are set on the connection's own
// strand and read by the watchman.
class Watched {
 public:
  virtual ~Watched() = default;
  virtual void abort() = 0;  // from any thread: closes the socket

  void set_deadline(Nanos from_now) {
    deadline_.store((monotonic_now() + from_now).time_since_epoch().count(), std::memory_order_relaxed);
  }
  bool is_late(TimePoint now) const {
    return now.time_since_epoch().count() > deadline_.load(std::memory_order_relaxed);
  }
  // Idle: between requests; may be closed for the sake of others.
  void set_idle(bool idle) {
    idle_since_.store(idle ? monotonic_now().time_since_epoch().count() : 0, std::memory_order_relaxed);
  }
  // A stream of events, which no one waits to be finished.
  void set_endless() { endless_.store(true, std::memory_order_relaxed); }
  bool is_endless() const { return endless_.load(std::memory_order_relaxed); }
  std::int64_t idle_since() const { return idle_since_.load(std::memory_order_relaxed); }

  std::string address;

 private:
  std::atomic<std::int64_t> deadline_{INT64_MAX};
  std::atomic<std::int64_t> idle_since_{0};
  std::atomic<bool> endless_{false};
};

class Shared {
 public:
  Shared(ServerOptions server_options, const Router& server_router, Authenticator& server_authenticator,
         std::function<void(const std::string&)> server_log)
      : options(std::move(server_options)),
        router(server_router),
        authenticator(server_authenticator),
        log(limited_log(std::move(server_log))),
        address_limiter_(options.per_address),
        token_limiter_(options.per_token) {}

  const ServerOptions options;
  const Router& router;
  Authenticator& authenticator;
  const LogFunction log;  // within its bound: requests cause its lines

  // Handlers wait for the store and for headers of files, readers for the disk: a slow disk
  // does not hold heartbeats up.
  asio::thread_pool handlers{2}, readers{4};
  std::atomic<std::size_t> jobs{0}, downloads{0};
  std::atomic<std::uint64_t> requests{0}, bytes_sent{0};
  std::atomic<bool> draining{false};
  std::shared_ptr<Relay> relay;  // set before the first connection

  Nanos take_address(const std::string& address, double cost = 1) {
    const MutexLock lock(limiters_);
    return address_limiter_.take(address, monotonic_now(), cost);
  }
  Nanos take_token(const std::string& token_id) {
    const MutexLock lock(limiters_);
    return token_limiter_.take(token_id, monotonic_now());
  }

  // Makes room first: false when nobody can be asked to leave.
  bool enter(const std::shared_ptr<Watched>& connection) {
    const MutexLock lock(connections_mutex_);
    const auto neighbours = per_address_.find(connection->address);
    const bool crowded = connections_.size() >= options.connections_max;
    const bool crowd_of_one =
        neighbours != per_address_.end() && neighbours->second >= options.connections_per_address_max;
    if (crowded || crowd_of_one) {
      Watched* oldest = nullptr;
      for (const auto& [raw, each] : connections_)
        if (each->idle_since() != 0 && (crowded || each->address == connection->address) &&
            (oldest == nullptr || each->idle_since() < oldest->idle_since()))
          oldest = raw;
      if (oldest == nullptr) return false;
      oldest->abort();  // keeps it alive until it is done
      forget(*oldest);
    }
    ++per_address_[connection->address];
    connections_.emplace(connection.get(), connection);
    return true;
  }
  void leave(Watched& connection) {
    const MutexLock lock(connections_mutex_);
    forget(connection);
  }
  std::size_t connection_count() const {
    const MutexLock lock(connections_mutex_);
    return connections_.size();
  }
  // Closes the late ones; all idle and endless ones if `idle_too`, everyone if `all`.
  void watch(bool idle_too, bool all) {
    const TimePoint now = monotonic_now();
    const MutexLock lock(connections_mutex_);
    for (const auto& [raw, each] : connections_)
      if (all || each->is_late(now) || (idle_too && (each->idle_since() != 0 || each->is_endless()))) each->abort();
  }

 private:
  void forget(Watched& connection) KVASIR_REQUIRES(connections_mutex_) {
    if (connections_.erase(&connection) == 0) return;
    const auto found = per_address_.find(connection.address);
    if (--found->second == 0) per_address_.erase(found);
  }

  Mutex limiters_;
  RateLimiter address_limiter_ KVASIR_GUARDED_BY(limiters_);
  RateLimiter token_limiter_ KVASIR_GUARDED_BY(limiters_);
  mutable Mutex connections_mutex_;
  std::map<Watched*, std::shared_ptr<Watched>> connections_ KVASIR_GUARDED_BY(connections_mutex_);
  std::map<std::string, std::size_t> per_address_ KVASIR_GUARDED_BY(connections_mutex_);
};

// Runs `work` on a pool's thread; the coroutine goes on on its own strand.
template <typename Work>
asio::awaitable<std::invoke_result_t<Work>> run_on(asio::thread_pool& pool, Work work) {
  co_return co_await asio::co_spawn(
      pool, [work = std::move(work)]() mutable -> asio::awaitable<std::invoke_result_t<Work>> { co_return work(); },
      asio::use_awaitable);
}

}  // namespace kvasir::hub
