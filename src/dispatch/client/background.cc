#include "dispatch/client/background.h"

#include <signal.h>

#include <algorithm>

namespace kvasir::dispatch {
namespace {

// Even with nothing due the thread looks around this often.
constexpr Nanos kIdleMax = std::chrono::milliseconds(500);

}  // namespace

Result<std::unique_ptr<Background>> Background::start(Shared& shared) {
  std::unique_ptr<Background> out(new Background(shared));
  if (shared.options.relay) {
    KVASIR_ASSIGN(out->relay_, net::RelayDialer::create(*shared.options.relay));
  }
  if (!shared.options.workers_follow) {
    // A list that a person wrote: what is wrong in it is an error, not a line in the log.
    for (const WorkerAddress& worker : shared.options.workers) {
      Peer peer;
      KVASIR_TRY(out->prepare_peer(worker, peer));
    }
  }
  if (!shared.options.workers.empty()) {
    {
      const MutexLock lock(shared.mutex);
      shared.wanted = shared.options.workers;
    }
    out->sync_table();
  }
  // Signals are the host program's: its handlers must not run on this thread.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  out->thread_ = std::thread([self = out.get()] { self->run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return out;
}

Background::~Background() {
  shared_.stop.store(true, std::memory_order_release);
  shared_.bell.ring();
  if (thread_.joinable()) thread_.join();
}

void Background::run() {
  std::vector<pollfd> fds;
  while (!shared_.stop.load(std::memory_order_acquire)) {
    TimePoint now = monotonic_now();
    const TimePoint wake = gather(fds, now);
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(std::clamp(wake - now, Nanos(0), kIdleMax));
    ::poll(fds.data(), fds.size(), static_cast<int>(wait.count()));
    shared_.bell.clear();
    // Taken before the sockets are read: what came while this thread slept is seen before
    // anybody is judged late.
    now = monotonic_now();
    try {
      sync_drivers(now);
      release_workers();
      sync_table();
      for (WorkerIndex w = 0; w < controls_.size(); ++w) step_control(w, now);
      for (Driver& driver : drivers_)
        for (WorkerIndex w = 0; w < controls_.size(); ++w) step_data(driver, w, now);
      say_who_holds_nothing(now);
    } catch (const std::bad_alloc&) {
      std::this_thread::sleep_for(kIdleMax);  // memory may come back; connections stand
    }
  }
}

TimePoint Background::gather(std::vector<pollfd>& fds, TimePoint now) {
  TimePoint wake = now + kIdleMax;
  fds.clear();
  fds.push_back({.fd = shared_.bell.fd(), .events = POLLIN, .revents = 0});
  for (WorkerIndex w = 0; w < controls_.size(); ++w) {
    const Control& control = controls_[w];
    if (control.use != Use::kWorker) continue;
    if (control.attempt) {
      control.attempt->gather(fds, wake);
    } else if (control.link) {
      const net::Stream& stream = *control.link->stream;
      fds.push_back({.fd = stream.fd(), .events = stream.wants(), .revents = 0});
      if (control.direct) control.direct->gather(fds, wake);
      wake = std::min(wake, control.ping_at);
    } else {
      const MutexLock lock(shared_.mutex);
      if (const auto next = shared_.fleet.next_attempt(w)) wake = std::min(wake, *next);
    }
  }
  for (const Driver& driver : drivers_) {
    for (WorkerIndex w = 0; w < controls_.size(); ++w) {
      const DataLink& data = driver.links[w];
      if (data.attempt) data.attempt->gather(fds, wake);
      else if (!data.handed_over && controls_[w].link) wake = std::min(wake, data.next_attempt);
    }
  }
  return wake;
}

// New drivers get links; those that are gone take their attempts with them.
void Background::sync_drivers(TimePoint now) {
  std::vector<std::shared_ptr<Port>> ports;
  {
    const MutexLock lock(shared_.mutex);
    ports = shared_.ports;
  }
  std::erase_if(drivers_, [&](const Driver& driver) { return std::ranges::find(ports, driver.port) == ports.end(); });
  for (const auto& port : ports) {
    const auto known = std::ranges::find(drivers_, port, &Driver::port);
    Driver& driver = known != drivers_.end() ? *known : drivers_.emplace_back(port, std::vector<DataLink>(controls_.size()));
    for (const LinkLost& lost : driver.port->collect_lost()) {
      DataLink& data = driver.links[lost.worker];
      data.handed_over = false;
      // A worker that greets and then drops every link is not asked ever faster.
      data.failures = now - data.handed_at < kLinkLifeMin ? data.failures + 1 : 0;
      const Nanos backoff = data.failures == 0 ? Nanos(0)
                                               : std::min(Tuning{}.backoff_first * (1 << std::min(data.failures, 12u)),
                                                          Tuning{}.backoff_max);
      data.next_attempt = now + std::max(lost.wait, backoff);
    }
    for (const WorkerIndex w : driver.port->collect_let_go()) driver.links[w].leaving = false;
  }
}

// --- data links --------------------------------------------------------------------------

void Background::step_data(Driver& driver, WorkerIndex w, TimePoint now) {
  DataLink& data = driver.links[w];
  if (!controls_[w].link) {
    data.attempt.reset();
    return;
  }
  if (!data.attempt) {
    if (data.handed_over || now < data.next_attempt) return;
    // The way that the control connection has found.
    data.attempt = std::make_unique<Dial>(controls_[w].peer, controls_[w].hello, tls(), now, controls_[w].way);
  }
  const Handshake::State state = data.attempt->step(now);
  if (state == Handshake::State::kPending) return;
  if (state == Handshake::State::kDone) {
    data.handed_over = true;
    data.handed_at = now;
    driver.port->post({.worker = w, .link = data.attempt->take_link()});
  } else {
    ++data.failures;
    const auto doubled = static_cast<std::int64_t>(1u << std::min(data.failures, 12u));
    const Nanos backoff = std::min(Tuning{}.backoff_first * doubled, Tuning{}.backoff_max);
    data.next_attempt = now + Nanos(static_cast<std::int64_t>(static_cast<double>(backoff.count()) * (0.5 + 0.5 * jitter_.unit())));
  }
  data.attempt.reset();
}

void Background::say_who_holds_nothing(TimePoint now) {
  std::vector<LayerKey> layers;
  {
    const MutexLock lock(shared_.mutex);
    if (shared_.layers.empty()) return;
    if (!layers_seen_) layers_seen_ = now;
    if (now - *layers_seen_ < kHoldsNothingAfter) return;
    for (const LayerEntry& layer : shared_.layers) layers.push_back(layer.key());
  }
  for (Control& control : controls_) {
    if (!control.link || control.nothing_held_said) continue;
    const bool shares = std::ranges::any_of(
        control.held, [&](const LayerKey& key) { return std::ranges::find(layers, key) != layers.end(); });
    if (shares) continue;
    control.nothing_held_said = true;
    shared_.log("worker " + control.peer.name +
                " holds no experts of this model (or of another version of it), so it is not asked; give it a slice of the file in use.");
  }
}

}  // namespace kvasir::dispatch
