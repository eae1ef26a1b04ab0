#include "worker/relay_listener.h"

#include <poll.h>

#include <algorithm>
#include <format>
#include <random>

namespace kvasir::worker {
namespace {

constexpr Nanos kLookMax = std::chrono::seconds(1);

Nanos jittered(Nanos time) {
  thread_local std::minstd_rand random(std::random_device{}());
  return time / 2 + time / 2 * static_cast<int>(random() % 1000) / 1000;
}

}  // namespace

RelayListener::RelayListener(RelayListenerOptions options)
    : options_(std::move(options)),
      name_(net::format_host_port(options_.dialer.dial_address())),
      thread_([this] { run(); }) {}

RelayListener::~RelayListener() {
  stop_ = true;
  wake_.raise();
  thread_.join();
}

void RelayListener::run() {
  std::vector<pollfd> fds;
  while (!stop_) {
    TimePoint now = monotonic_now();
    std::erase_if(waiting_, [&](Waiting& waiting) { return !look_at(waiting, now); });
    while (!stop_ && waiting_.size() < wanted(now) && now >= next_dial_) {
      dial(now);
      now = monotonic_now();
    }
    TimePoint until = now + kLookMax;
    if (waiting_.size() < wanted(now)) until = std::min(until, std::max(next_dial_, now));
    fds.assign({{wake_.fd(), POLLIN, 0}});
    for (const Waiting& waiting : waiting_) {
      fds.push_back({waiting.stream->fd(), waiting.stream->wants(), 0});
      if (!waiting.open) until = std::min(until, waiting.deadline);
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - now).count();
    ::poll(fds.data(), fds.size(), static_cast<int>(std::max<std::int64_t>(left, 0)));
    if (fds[0].revents != 0) wake_.clear();
  }
}

void RelayListener::dial(TimePoint now) {
  if (addresses_.empty() || now - resolved_ >= kRelayResolveAgain) {
    Result<std::vector<net::Address>> found = net::resolve(options_.dialer.dial_address());
    if (found) {
      addresses_ = *std::move(found);
      resolved_ = now;
    } else if (addresses_.empty()) {
      return note_failure(found.error(), now);
    }
  }
  Result<net::Fd> fd = net::connect_any(addresses_, kRelayConnectMax);
  if (!fd) return note_failure(fd.error(), monotonic_now());
  using Payload = net::RelayDialer::Payload;
  const Payload payload = options_.tls ? Payload::kCiphertext : Payload::kAnyBytes;
  Result<std::unique_ptr<net::WebSocketStream>> stream = options_.dialer.open(*std::move(fd), options_.session, payload);
  if (!stream) return note_failure(stream.error(), monotonic_now());
  waiting_.push_back({.stream = *std::move(stream), .deadline = monotonic_now() + kRelayOpenMax});
  // Until this one is open nothing says that a second would fare better.
  if (failures_ > 0) next_dial_ = waiting_.back().deadline;
}

bool RelayListener::look_at(Waiting& waiting, TimePoint now) {
  const Result<bool> taken = waiting.stream->has_input();
  if (!taken) {
    note_failure(taken.error(), now);
    return false;
  }
  if (!waiting.open) {
    const Result<bool> open = waiting.stream->is_open();
    if (open && *open) {
      waiting.open = true;
      failures_ = 0;
      next_dial_ = now;
      if (!std::exchange(was_open_, true))
        options_.log(std::format("waiting at the relay {} as '{}'", name_, options_.session));
      last_said_.clear();
    } else if (now >= waiting.deadline) {
      note_failure(Error{ErrorAction::kRetryLater, "the relay does not answer."}, now);
      return false;
    }
  }
  if (!*taken) return true;
  take(waiting, now);
  return false;
}

void RelayListener::take(Waiting& waiting, TimePoint now) {
  busy_until_ = now + kRelayBusy;
  std::string peer = std::format("relay {} #{}", name_, ++n_taken_);
  if (!options_.tls) return options_.accept(std::move(waiting.stream), std::move(peer));
  Result<std::unique_ptr<net::Stream>> stream = net::make_tls_server_stream(std::move(waiting.stream), *options_.tls);
  if (stream) options_.accept(*std::move(stream), std::move(peer));
  else options_.log(stream.error().message);
}

void RelayListener::note_failure(const Error& error, TimePoint now) {
  const bool refused = error.action == ErrorAction::kFixInput;
  const Nanos backoff = std::min(kRelayBackoffFirst * (1 << std::min(failures_, 12u)), kRelayBackoffMax);
  ++failures_;
  next_dial_ = now + (refused ? kRelayRefusedPause : jittered(backoff));
  // A relay that restarts, or goes for a moment, is no news yet.
  if (error.message == last_said_ || (!refused && failures_ < 3)) return;
  was_open_ = false;
  last_said_ = error.message;
  options_.log(std::format("not reachable through the relay {}: {}", name_, error.message));
}

}  // namespace kvasir::worker
