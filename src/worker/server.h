// A worker's port: accepts, bounds the number of connections, and drains on request.
#pragma once

#include <list>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "net/connect.h"
#include "worker/connection.h"
#include "worker/server_core.h"

namespace kvasir::worker {

class Server {
 public:
  // `buffer_type`: where uploaded experts go, the device's that `engine` computes on.
  static Result<std::unique_ptr<Server>> listen(const net::HostPort& where, SliceStore store,
                                                ggml_backend_buffer_type_t buffer_type,
                                                std::unique_ptr<ffn::Engine> engine, wire::NumericsId numerics_id,
                                                ServerOptions options);
  ~Server();  // cuts what is left

  std::uint16_t port() const { return listener_.port; }
  const WorkerStats& stats() const { return core_.stats; }
  // For Prometheus; any thread.
  std::string metrics() const { return core_.stats.to_metrics(core_.gate, core_.store.bytes(), core_.options.software); }

  // Serves until request_stop(), then drains: true if every connection ended in time.
  bool run();
  // Serves a peer that came another way than through the port; from any thread.
  void adopt(std::unique_ptr<net::Stream> stream, std::string peer);
  // Async-signal-safe; from any thread.
  void request_stop() noexcept {
    stop_ = true;
    wake_.raise();
  }

 private:
  struct Served {
    std::unique_ptr<Connection> connection;
    bool turned_away;
    std::thread thread;
  };

  Server(net::Listener listener, SliceStore store, ggml_backend_buffer_type_t buffer_type,
         std::unique_ptr<ffn::Engine> engine, wire::NumericsId numerics_id, ServerOptions options)
      : listener_(std::move(listener)),
        core_(std::move(store), buffer_type, std::move(engine), std::move(numerics_id), std::move(options)) {}

  void accept_waiting();
  void start_adopted();
  void start(net::Accepted accepted);
  void start(std::unique_ptr<net::Stream> stream, std::string peer);
  void reap();
  void write_stats() const;
  bool drain();

  net::Listener listener_;
  ServerCore core_;
  Wake wake_;
  std::atomic<bool> stop_ = false;
  std::list<Served> served_;
  Mutex adopted_mutex_;
  std::vector<std::pair<std::unique_ptr<net::Stream>, std::string>> adopted_ KVASIR_GUARDED_BY(adopted_mutex_);
};

}  // namespace kvasir::worker
