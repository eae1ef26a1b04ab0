// The one place in front of the engine, and the bounded line before it. A connection's
// thread that finds the gate open computes at once, on its own core and without a hand-off;
// otherwise it takes a ticket, goes on reading (so that a CANCEL is seen), and is woken
// through a descriptor when its turn comes. First come, first served; but whoever has the turn
// may take along waiting work of others that its own computation can do as well (merge.h).
//
// The line is bounded by number and by the time that those before a newcomer are expected to take.
//
// Thread contract: all members may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"

namespace kvasir::worker {

class ComputeGate {
 public:
  class Ticket;
  // What waits with a ticket and may be taken along. Whoever took it shares it, because its
  // ticket may be withdrawn meanwhile.
  class Work {
   public:
    virtual ~Work() = default;

   private:
    friend class ComputeGate;
    Ticket* ticket_ = nullptr;  // null: withdrawn; guarded by the gate's mutex
  };

  // A place in the line. Lives as long as it is in the line or has the turn.
  class Ticket {
   public:
    explicit Ticket(int wake_fd) : wake_fd_(wake_fd) {}  // an eventfd
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;

   private:
    friend class ComputeGate;
    int wake_fd_;
    // Guarded by the gate's mutex. `work_` as long as it is in the line or taken along.
    bool queued_ = false, granted_ = false, delivered_ = false;
    Nanos cost_{};
    std::shared_ptr<Work> work_;
  };

  // `wait_max`: of expected time before a newcomer; 0: any. One may always wait, whatever runs.
  explicit ComputeGate(std::uint32_t waiting_max, Nanos wait_max = {}) : waiting_max_(waiting_max), wait_max_(wait_max) {}

  // Takes the turn if nobody has it and nobody waits.
  bool try_enter(Ticket& ticket);
  // Joins the line, or takes the turn at once. `cost`: what the request is expected to take; 0: not
  // known. False: the line is full, or too long.
  bool join(Ticket& ticket, Nanos cost = {}, std::shared_ptr<Work> work = nullptr);
  // The same of a ticket that has the turn.
  void expect(Ticket& ticket, Nanos cost);
  bool has_turn(const Ticket& ticket) const;

  // Out of the line, in its order, the work that `fits` says yes to. The caller has the turn and
  // delivers each.
  template <typename Fits>
  std::vector<std::shared_ptr<Work>> take_along(Fits fits) {
    std::vector<std::shared_ptr<Work>> taken;
    const MutexLock lock(mutex_);
    for (auto at = line_.begin(); at != line_.end();) {
      Ticket& ticket = **at;
      if (!ticket.work_ || !fits(*ticket.work_)) {
        ++at;
        continue;
      }
      ticket.queued_ = false;
      line_time_ -= ticket.cost_;
      taken.push_back(ticket.work_);
      at = line_.erase(at);
    }
    waiting_.store(static_cast<std::uint32_t>(line_.size()), std::memory_order_relaxed);
    return taken;
  }
  // Wakes the owner, if the ticket still stands.
  void deliver(Work& work);
  bool delivered(const Ticket& ticket) const;

  // Out of the line; if the ticket has the turn, gives it to the next. Any number of times.
  void withdraw(Ticket& ticket);

  // Leaves the line, or gives the turn on, however its scope ends.
  class Guard {
   public:
    Guard(ComputeGate& gate, Ticket& ticket) : gate_(gate), ticket_(ticket) {}
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;
    ~Guard() { gate_.withdraw(ticket_); }

   private:
    ComputeGate& gate_;
    Ticket& ticket_;
  };

  std::uint32_t waiting() const { return waiting_.load(std::memory_order_relaxed); }
  std::uint32_t waiting_max() const { return waiting_max_; }
  // What those that wait are expected to take.
  Nanos waiting_time() const;
  // How long the gate has been held in all, up to `now`.
  Nanos held(TimePoint now) const;

 private:
  void take(Ticket& ticket, TimePoint now) KVASIR_REQUIRES(mutex_);
  static void part_from_work(Ticket& ticket);

  const std::uint32_t waiting_max_;
  const Nanos wait_max_;
  mutable Mutex mutex_;
  bool taken_ KVASIR_GUARDED_BY(mutex_) = false;
  TimePoint taken_at_ KVASIR_GUARDED_BY(mutex_){};
  Nanos held_ KVASIR_GUARDED_BY(mutex_){};
  Nanos running_ KVASIR_GUARDED_BY(mutex_){};    // expected of what has the turn
  Nanos line_time_ KVASIR_GUARDED_BY(mutex_){};  // expected of the line
  std::list<Ticket*> line_ KVASIR_GUARDED_BY(mutex_);
  std::atomic<std::uint32_t> waiting_ = 0;
};

}  // namespace kvasir::worker
