// What all connections of one worker share.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "base/log_limit.h"
#include "ffn/engine.h"
#include "ffn/tuner.h"
#include "net/grant.h"
#include "net/tls.h"
#include "spdlog/spdlog.h"
#include "worker/compute_gate.h"
#include "worker/exec_request.h"
#include "worker/limits.h"
#include "worker/live_store.h"
#include "worker/memory_budget.h"
#include "worker/peer_io.h"
#include "worker/served_ledger.h"
#include "worker/slice_store.h"
#include "worker/worker_stats.h"

namespace kvasir::worker {

// Session grants are taken beside the token, over TLS.
struct GrantCheck {
  net::PublicKey hub{};   // who signs them
  std::string worker_id;  // whom they must name
};

struct ServerOptions {
  std::uint32_t queue = kQueueDefault;
  std::uint32_t queue_ms = kQueueMsDefault;  // 0: by number alone
  std::uint32_t piece_pairs = kPiecePairs;  // 0: every request is one piece
  std::uint32_t spin_us = kSpinUsDefault;
  std::uint64_t request_bytes_max = kRequestBytesMax;
  std::uint32_t merged_pairs_max = kMergedPairsMax;  // 0: no request shares a computation
  std::uint64_t memory_bytes = 0;  // for experts; 0: no uploads are taken
  std::string token;  // empty: none is asked for
  std::optional<GrantCheck> grants;
  std::shared_ptr<ServedLedger> served;  // may be null
  bool raw_framing = false;
  std::optional<std::uint32_t> raw_layer;
  std::optional<net::TlsContext> tls;
  std::string software = "kvasir";
  ffn::Tuning tuning;  // as measured at the start; zeros: not measured
  std::string stats_file;
  std::string metrics_file;
  Timeouts timeouts;
};

struct ServerCore {
  ServerCore(SliceStore held, ggml_backend_buffer_type_t buffer_type, std::unique_ptr<ffn::Engine> ffn_engine,
             wire::NumericsId id, ServerOptions chosen)
      : options(std::move(chosen)),
        store(std::move(held), options.memory_bytes, buffer_type),
        engine(std::move(ffn_engine)),
        numerics_id(std::move(id)),
        gate(options.queue, std::chrono::milliseconds(options.queue_ms)),
        budget(options.request_bytes_max) {
    stats.costs.seed(options.tuning.exact, options.tuning.fast);
  }

  // A line that a peer has caused, unless those are too many.
  void log_of_peer(spdlog::level::level_enum level, const std::string& line) {
    if (const auto note = peer_lines.take(monotonic_now())) spdlog::log(level, "{}{}", line, *note);
  }

  const ServerOptions options;
  LiveStore store;
  const std::unique_ptr<ffn::Engine> engine;  // used by whoever has the gate's turn
  const wire::NumericsId numerics_id;
  ComputeGate gate;
  ExecRequest::Batch batch;  // guarded by the gate's turn
  std::uint64_t freed_seen = 0;  // of store.freed(), when the engine last forgot; guarded by the gate's turn
  MemoryBudget budget;
  WorkerStats stats;
  LogLimit peer_lines;
  std::atomic<bool> draining = false;
};

}  // namespace kvasir::worker
