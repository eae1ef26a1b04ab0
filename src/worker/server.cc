#include "worker/server.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <format>
#include <fstream>

#include "base/metrics.h"
#include "spdlog/spdlog.h"

namespace kvasir::worker {
namespace {

constexpr int kTickMs = 250;
constexpr Nanos kStatsInterval = std::chrono::seconds(1);

}  // namespace

Result<std::unique_ptr<Server>> Server::listen(const net::HostPort& where, SliceStore store,
                                               ggml_backend_buffer_type_t buffer_type,
                                               std::unique_ptr<ffn::Engine> engine, wire::NumericsId numerics_id,
                                               ServerOptions options) {
  KVASIR_ASSIGN(net::Listener listener, net::listen_on(where));
  return std::unique_ptr<Server>(new Server(std::move(listener), std::move(store), buffer_type, std::move(engine),
                                            std::move(numerics_id), std::move(options)));
}

Server::~Server() {
  for (Served& served : served_) {
    served.connection->cut();
  }
  for (Served& served : served_) served.thread.join();
}

bool Server::run() {
  std::array<pollfd, 2> fds{{{listener_.fd.get(), POLLIN, 0}, {wake_.fd(), POLLIN, 0}}};
  TimePoint write_stats_at = monotonic_now();
  while (!stop_) {
    const int ready = ::poll(fds.data(), fds.size(), kTickMs);
    if (stop_) break;
    wake_.clear();
    start_adopted();
    if (ready > 0 && fds[0].revents != 0) accept_waiting();
    reap();
    const TimePoint now = monotonic_now();
    core_.stats.sample(core_.gate, now);
    if (now >= write_stats_at) {
      write_stats();
      write_stats_at = now + kStatsInterval;
    }
  }
  return drain();
}

void Server::accept_waiting() {
  while (true) {
    Result<std::optional<net::Accepted>> accepted = net::accept_from(listener_);
    if (!accepted) {
      core_.log_of_peer(spdlog::level::err, accepted.error().message);
      std::this_thread::sleep_for(std::chrono::milliseconds(kTickMs));  // descriptors may come free
      return;
    }
    if (!*accepted) return;
    reap();
    start(**std::move(accepted));
  }
}

void Server::adopt(std::unique_ptr<net::Stream> stream, std::string peer) {
  {
    const MutexLock lock(adopted_mutex_);
    if (adopted_.size() >= kConnectionsMax) return;  // closes
    adopted_.emplace_back(std::move(stream), std::move(peer));
  }
  wake_.raise();
}

void Server::start_adopted() {
  std::vector<std::pair<std::unique_ptr<net::Stream>, std::string>> adopted;
  {
    const MutexLock lock(adopted_mutex_);
    adopted.swap(adopted_);
  }
  for (auto& [stream, peer] : adopted) {
    reap();
    start(std::move(stream), std::move(peer));
  }
}

void Server::start(net::Accepted accepted) {
  if (!core_.options.tls) return start(net::make_plain_stream(std::move(accepted.fd)), std::move(accepted.peer));
  Result<std::unique_ptr<net::Stream>> made = net::make_tls_server_stream(std::move(accepted.fd), *core_.options.tls);
  if (made) start(*std::move(made), std::move(accepted.peer));
  else core_.log_of_peer(spdlog::level::err, std::format("{}: {}", accepted.peer, made.error().message));
}

void Server::start(std::unique_ptr<net::Stream> stream, std::string peer) {
  const auto turned_away = static_cast<std::size_t>(std::ranges::count(served_, true, &Served::turned_away));
  const bool full = served_.size() - turned_away >= kConnectionsMax;
  if (full && turned_away >= kRefusalsMax) {
    ++core_.stats.connections_refused;
    return;  // closes
  }
  try {
    Served& served =
        served_.emplace_back(std::make_unique<Connection>(core_, std::move(stream), std::move(peer)), full, std::thread());
    try {
      served.thread = std::thread([connection = served.connection.get(), full, wake = &wake_] {
        if (full) connection->turn_away(wire::ErrorCode::kBusy, "This worker has as many connections as it takes.");
        else connection->run();
        wake->raise();  // to be reaped
      });
    } catch (...) {
      served_.pop_back();
      throw;
    }
  } catch (const std::exception& e) {  // no thread, descriptor or memory for another peer
    ++core_.stats.connections_refused;
    core_.log_of_peer(spdlog::level::err, std::format("A connection was refused: {}", e.what()));
  }
}

void Server::reap() {
  std::erase_if(served_, [](Served& served) {
    if (!served.connection->finished()) return false;
    served.thread.join();
    return true;
  });
}

// Written aside and renamed, so that a reader never sees half of it.
void Server::write_stats() const {
  if (const std::string& file = core_.options.metrics_file; !file.empty() && !replace_file(file, metrics()))
    spdlog::warn("Cannot write the metrics to '{}'.", file);
  const std::string& path = core_.options.stats_file;
  if (path.empty()) return;
  const std::string aside = path + ".new";
  {
    std::ofstream out(aside, std::ios::trunc);
    out << core_.stats.to_json(core_.gate, core_.store.bytes());
    if (!out.flush()) {
      spdlog::warn("Cannot write the statistics to '{}'.", aside);
      return;
    }
  }
  if (std::rename(aside.c_str(), path.c_str()) != 0) spdlog::warn("Cannot write the statistics to '{}'.", path);
}

bool Server::drain() {
  listener_.fd.reset();  // new peers are refused by the system and try a replica
  core_.draining = true;
  spdlog::info("draining {} connections", served_.size());
  for (Served& served : served_) served.connection->drain();
  const TimePoint deadline = monotonic_now() + core_.options.timeouts.drain;
  pollfd fd{wake_.fd(), POLLIN, 0};
  wake_.clear();
  while (reap(), !served_.empty() && monotonic_now() < deadline) {
    ::poll(&fd, 1, 50);
    wake_.clear();
  }
  write_stats();
  if (served_.empty()) return true;
  spdlog::warn("{} connections did not finish in time and are cut", served_.size());
  for (Served& served : served_) {
    served.connection->cut();
  }
  return false;
}

}  // namespace kvasir::worker
