#include "worker/compute_gate.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvasir::worker {

void ComputeGate::take(Ticket& ticket, TimePoint now) {
  taken_ = true;
  taken_at_ = now;
  running_ = ticket.cost_;
  ticket.queued_ = false;
  ticket.granted_ = true;
  part_from_work(ticket);
}

// Its owner does it, or wants it no more.
void ComputeGate::part_from_work(Ticket& ticket) {
  if (ticket.work_) ticket.work_->ticket_ = nullptr;
  ticket.work_.reset();
}

bool ComputeGate::try_enter(Ticket& ticket) {
  const MutexLock lock(mutex_);
  KVASIR_CHECK(!ticket.queued_ && !ticket.granted_);
  if (taken_ || !line_.empty()) return false;
  take(ticket, monotonic_now());
  return true;
}

bool ComputeGate::join(Ticket& ticket, Nanos cost, std::shared_ptr<Work> work) {
  const MutexLock lock(mutex_);
  KVASIR_CHECK(!ticket.queued_ && !ticket.granted_);
  ticket.cost_ = cost;
  if (!taken_ && line_.empty()) {
    take(ticket, monotonic_now());
    return true;
  }
  if (line_.size() >= waiting_max_) return false;
  if (wait_max_ > Nanos(0) && !line_.empty()) {
    const Nanos left = std::max(Nanos(0), running_ - (monotonic_now() - taken_at_));
    if (left + line_time_ > wait_max_) return false;
  }
  line_.push_back(&ticket);
  line_time_ += cost;
  ticket.queued_ = true;
  ticket.work_ = std::move(work);
  if (ticket.work_) ticket.work_->ticket_ = &ticket;
  waiting_.store(static_cast<std::uint32_t>(line_.size()), std::memory_order_relaxed);
  return true;
}

bool ComputeGate::has_turn(const Ticket& ticket) const {
  const MutexLock lock(mutex_);
  return ticket.granted_;
}

void ComputeGate::deliver(Work& work) {
  const MutexLock lock(mutex_);
  if (work.ticket_ == nullptr) return;
  Ticket& ticket = *work.ticket_;
  ticket.delivered_ = true;
  part_from_work(ticket);
  ::eventfd_write(ticket.wake_fd_, 1);
}

bool ComputeGate::delivered(const Ticket& ticket) const {
  const MutexLock lock(mutex_);
  return ticket.delivered_;
}

void ComputeGate::withdraw(Ticket& ticket) {
  const MutexLock lock(mutex_);
  part_from_work(ticket);
  if (ticket.queued_) {
    line_.remove(&ticket);
    line_time_ -= ticket.cost_;
    ticket.queued_ = false;
  } else if (ticket.granted_) {
    const TimePoint now = monotonic_now();
    held_ += now - taken_at_;
    taken_ = false;
    ticket.granted_ = false;
    if (!line_.empty()) {
      Ticket* next = line_.front();
      line_.pop_front();
      line_time_ -= next->cost_;
      take(*next, now);
      ::eventfd_write(next->wake_fd_, 1);  // fails only past 2^64 - 2 unread wake-ups
    }
  }
  waiting_.store(static_cast<std::uint32_t>(line_.size()), std::memory_order_relaxed);
}

void ComputeGate::expect(Ticket& ticket, Nanos cost) {
  const MutexLock lock(mutex_);
  KVASIR_CHECK(ticket.granted_);
  running_ = ticket.cost_ = cost;
}

Nanos ComputeGate::waiting_time() const {
  const MutexLock lock(mutex_);
  return line_time_;
}

Nanos ComputeGate::held(TimePoint now) const {
  const MutexLock lock(mutex_);
  return taken_ && now > taken_at_ ? held_ + (now - taken_at_) : held_;
}

}  // namespace kvasir::worker
