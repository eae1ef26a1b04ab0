#include "dispatch/client/shared.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace kvasir::dispatch {

Result<Bell> Bell::create() {
  net::Fd fd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!fd) return fatal("cannot make an event descriptor: " + errno_text(errno) + "; raise the limit of open files (ulimit -n).");
  return Bell(std::move(fd));
}

// A full or empty counter is as good as a rung or cleared bell.
void Bell::ring() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(fd_.get(), &one, sizeof one);
}

void Bell::clear() const {
  std::uint64_t count;
  [[maybe_unused]] const ssize_t n = ::read(fd_.get(), &count, sizeof count);
}

void Port::post(Mail mail) {
  {
    const MutexLock lock(mutex_);
    mail_.push_back(std::move(mail));
    has_mail_.store(true, std::memory_order_release);
  }
  bell_.ring();
}

std::vector<Mail> Port::collect() {
  bell_.clear();
  const MutexLock lock(mutex_);
  has_mail_.store(false, std::memory_order_release);
  for (const Mail& mail : mail_) {
    if (!mail.link) continue;
    if (delivered_.size() <= mail.worker) delivered_.resize(mail.worker + 1);
    delivered_[mail.worker] = true;
  }
  return std::exchange(mail_, {});
}

bool Port::retire(WorkerIndex w) {
  {
    const MutexLock lock(mutex_);
    std::erase_if(mail_, [&](const Mail& mail) { return mail.worker == w; });
    if (w >= delivered_.size() || !delivered_[w]) return true;
  }
  post({.worker = w, .link = nullptr, .removed = true});
  return false;
}

void Port::report_let_go(WorkerIndex w) {
  const MutexLock lock(mutex_);
  delivered_[w] = false;
  let_go_.push_back(w);
}

std::vector<WorkerIndex> Port::collect_let_go() {
  const MutexLock lock(mutex_);
  return std::exchange(let_go_, {});
}

void Port::report_lost(LinkLost lost) {
  const MutexLock lock(mutex_);
  lost_.push_back(lost);
}

std::vector<LinkLost> Port::collect_lost() {
  const MutexLock lock(mutex_);
  return std::exchange(lost_, {});
}

}  // namespace kvasir::dispatch
