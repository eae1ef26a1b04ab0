// A worker for tests: the real codec over real sockets, with faults to order. Its "expert" is
// value * (expert + 1) + 0.5, so that a test can check every output.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/expert_set.h"
#include "base/mutex.h"
#include "net/connect.h"
#include "net/frame_io.h"
#include "net/tls.h"

namespace kvasir::dispatch {

inline float fake_expert(float value, std::uint32_t expert) { return value * static_cast<float>(expert + 1) + 0.5f; }

// Wrong answers of the right shape.
enum class Lie { kNone, kFlippedBit, kNormOff1, kNormOff5, kOlderAnswer, kOtherExpert, kHuge };

class FakeWorker {
 public:
  struct Faults {
    std::atomic<std::int64_t> delay_ns{0};     // before each answer
    std::atomic<bool> swallow{false};          // reads EXECs, answers none; pings are answered
    std::atomic<bool> frozen{false};           // reads nothing, answers nothing, socket open
    std::atomic<int> close_mid_frame{0};       // so many answers stop half-way, then close
    std::atomic<int> bad_checksum{0};
    std::atomic<int> nan{0};
    std::atomic<int> wrong_count{0};           // total_rows is one too many
    std::atomic<Lie> lie{Lie::kNone};          // in one row of each answer
    std::atomic<int> twice{0};                 // answers are sent twice
    std::atomic<int> busy{0};                  // answered with ERROR kBusy
    std::atomic<bool> refuse_hello{false};
    std::atomic<std::uint32_t> rows_per_frame{0};  // 0: all in one
  };

  FakeWorker(wire::LayerId layer, ExpertSet experts, std::uint32_t n_embd, const net::TlsIdentity* tls = nullptr);
  ~FakeWorker();

  std::uint16_t port() const { return port_; }
  void stop();     // as if killed: every socket closes
  void restart();  // on the same port
  void drain();    // DRAIN on every connection

  Faults faults;
  std::atomic<std::uint64_t> execs{0}, cancels{0}, connections{0}, rows_received{0};

 private:
  struct Connection {
    std::unique_ptr<net::Stream> stream;
    net::FrameReader reader;
    net::FrameWriter writer;
  };
  void accept_loop();
  void serve(net::Fd fd);
  bool on_frame(Connection& c, const net::Frame& frame);
  void tell_lie(const wire::ExecView& exec, std::span<float> rows);
  bool answer(Connection& c, std::uint64_t id, const wire::ExecView& exec);
  bool send(Connection& c, const Bytes& frame) { return c.writer.send(*c.stream, frame).has_value(); }

  const wire::LayerId layer_;
  const ExpertSet experts_;
  const std::uint32_t n_embd_;
  std::optional<net::TlsContext> tls_;
  net::Listener listener_;
  std::uint16_t port_ = 0;
  std::atomic<bool> stop_{false};
  std::atomic<int> drain_epoch_{0};
  std::thread acceptor_;
  std::vector<std::thread> threads_;
  Mutex older_mutex_;
  std::vector<float> older_ KVASIR_GUARDED_BY(older_mutex_);  // a row answered before
};

}  // namespace kvasir::dispatch
