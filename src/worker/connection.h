// One peer, from accept to close, on a thread of its own: tells the two framings apart,
// greets, then answers frames. Requests run inline when the engine is free; otherwise they
// wait in the gate's line while the thread goes on reading, so PING and CANCEL are seen. What
// waits may be computed along with another connection's request (merge.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "net/frame_io.h"
#include "worker/merge.h"
#include "worker/server_core.h"

namespace kvasir::worker {

inline constexpr const char* kLayerNotHeld =
    "This worker holds no expert of that layer: its slice is of another model, or made room for another.";

class Connection {
 public:
  Connection(ServerCore& core, std::unique_ptr<net::Stream> stream, std::string peer);
  ~Connection();

  // The thread's body. Returns when the connection is over.
  void run() noexcept;
  // Instead of run(): says why, and closes.
  void turn_away(wire::ErrorCode code, std::string why) noexcept;

  // From other threads, while the object lives.
  void drain() const { greeted_ ? wake_.raise() : cut(); }
  void cut() const;  // makes every wait of run() end
  bool finished() const { return finished_; }

 private:
  struct Pending {
    Pending(std::uint64_t id, int wake_fd, MemoryBudget::Share held)
        : request_id(id), ticket(wake_fd), share(std::move(held)) {}
    ByteSpan bytes() const { return work ? ByteSpan(work->payload) : ByteSpan(payload); }
    std::uint64_t request_id;
    Bytes payload;                        // unless it is the work's
    std::shared_ptr<MergeableWork> work;  // null: it shares no computation
    ComputeGate::Ticket ticket;
    MemoryBudget::Share share;
  };

  Status serve();
  Result<bool> greet();  // false: turned away, or not of our framing
  Result<void> check_grant(std::string_view token);
  Status serve_frames();
  Result<bool> read_frames();  // true: more may be there already
  Status wait_for_more();
  Status on_frame(const net::Frame& frame);
  Status on_layer_recipe(const net::Frame& frame);
  Status on_exec(const net::Frame& frame);
  Nanos expected_time(ByteSpan exec_payload) const;
  Status on_cancel(std::uint64_t request_id);
  Status on_upload(const net::Frame& frame);
  Status refuse_upload(std::uint64_t request_id, wire::ErrorMessage why);
  Status drop_stalled_upload();
  // After a change of what is held: tells the peer, and finds the recipes' layers anew.
  Status follow_store();
  void find_layers();
  static Status check_fit(const wire::Recipe& recipe, const HeldLayer& layer);
  Status malformed(const net::Frame& frame, std::string why);
  Status answer(std::uint64_t request_id, ByteSpan payload, ComputeGate::Ticket& ticket);
  bool pending_ready() const;
  Status run_pending();
  std::shared_ptr<MergeableWork> mergeable(ByteSpan payload);
  Status send_refusal(std::uint64_t request_id, ExecRequest& request, wire::ErrorMessage why);
  Status send_last_rows(std::uint64_t request_id, const wire::ExecHead& exec, std::size_t request_bytes, ExecRequest& request, Nanos computed);
  // Part of an answer. Without `wait`, what the socket does not take at once is queued.
  Status send_rows(std::uint64_t request_id, const wire::ExecHead& exec, const ExecRequest::Rows& rows,
                   std::uint32_t total_rows, Nanos computed, bool wait);
  Status send(ByteSpan frame) { return send_whole(*stream_, writer_, core_.options.timeouts, frame); }
  Status send_error(std::uint64_t request_id, wire::ErrorCode code, std::string message);
  bool checksum() const { return !stream_->encrypted(); }

  ServerCore& core_;
  std::unique_ptr<net::Stream> stream_;
  const std::string peer_;
  const Wake wake_;
  std::atomic<bool> greeted_ = false;
  std::atomic<bool> finished_ = false;

  net::FrameReader reader_;
  net::FrameWriter writer_;
  struct Bound {
    wire::LayerId layer_id;
    BoundRecipe recipe;  // layer null: not held now
  };
  std::unordered_map<std::uint32_t, Bound> recipes_;  // by the peer's number, < kRecipesMax
  std::uint64_t store_version_ = 0;                   // that recipes_ and the last HOLDINGS are of
  struct Upload {
    std::uint64_t request_id;
    IncomingSlice slice;
    TimePoint deadline;  // of its next part
  };
  std::optional<Upload> upload_;
  std::uint64_t refused_upload_ = 0;  // request id whose remaining parts are ignored
  bool same_numerics_ = false;
  ExecRequest request_;
  std::list<Pending> pending_;
  std::string backbone_;  // its token id, from its grant
  std::uint64_t n_answered_ = 0;

  bool ended_ = false;  // the peer has closed: it wants no answers any more
  bool drain_said_ = false;
  TimePoint close_at_ = TimePoint::max();       // after DRAIN
  TimePoint spin_until_{};                      // after an answer
  Progress incoming_;                           // of a frame that is not complete
};

}  // namespace kvasir::worker
