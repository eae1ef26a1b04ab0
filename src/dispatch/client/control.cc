// Background, second half: the control connections.
#include <algorithm>

#include "dispatch/client/background.h"

namespace kvasir::dispatch {

void Background::step_control(WorkerIndex w, TimePoint now) {
  Control& control = controls_[w];
  if (control.use != Use::kWorker) return;
  if (control.link) {
    read_control(w, now);
    if (control.link) ping(w, now);
    if (control.link && control.way == Way::kRelay && has_way(control.peer, Way::kDirect)) try_direct(w, now);
    return;
  }
  if (!control.attempt) {
    {
      const MutexLock lock(shared_.mutex);
      const std::optional<TimePoint> due = shared_.fleet.next_attempt(w);
      if (!due || now < *due) return;
    }
    begin_attempt(w, now);
  }
  if (control.attempt) {
    const Handshake::State state = control.attempt->step(now);
    if (state != Handshake::State::kPending) finish_attempt(w, state, now);
  }
}

void Background::begin_attempt(WorkerIndex w, TimePoint now) {
  Control& control = controls_[w];
  if (const Status resolved = resolve(control, now); !resolved) return lose_control(w, resolved.error().message, now);
  {
    const MutexLock lock(shared_.mutex);
    shared_.fleet.on_connecting(w);
  }
  control.attempt = std::make_unique<Dial>(control.peer, control.hello, tls(), now);
}

// A name that cannot be found now keeps its last addresses. An error: there is nowhere to connect to.
Status Background::resolve(Control& control, TimePoint now) {
  Status status;
  if (has_way(control.peer, Way::kDirect) && (control.peer.addresses.empty() || now >= control.resolve_at)) {
    Result<std::vector<net::Address>> found = net::resolve({control.peer.where.host, control.peer.where.port});
    if (found) {
      control.peer.addresses = *std::move(found);
      control.resolve_at = now + kResolveAgain;
    } else {
      status = std::unexpected(found.error());
    }
  }
  if (!has_way(control.peer, Way::kRelay)) return control.peer.addresses.empty() ? status : Status{};
  if (relay_addresses_.empty() || now >= relay_resolve_at_) {
    Result<std::vector<net::Address>> found = net::resolve(relay_->dial_address());
    if (found) {
      relay_addresses_ = *std::move(found);
      relay_resolve_at_ = now + kResolveAgain;
    } else {
      status = std::unexpected(found.error());
    }
  }
  control.peer.relay_addresses = relay_addresses_;
  return control.peer.addresses.empty() && relay_addresses_.empty() ? status : Status{};
}

// From the relay to a direct connection, as soon as there can be one.
void Background::try_direct(WorkerIndex w, TimePoint now) {
  Control& control = controls_[w];
  if (!control.direct) {
    if (now < control.direct_at) return;
    control.direct_at = now + kDirectAgain;
    if (!resolve(control, now)) return;
    control.direct = std::make_unique<Dial>(control.peer, control.hello, tls(), now, Way::kDirect);
  }
  const Handshake::State state = control.direct->step(now);
  if (state == Handshake::State::kPending) return;
  const std::unique_ptr<Dial> attempt = std::move(control.direct);
  if (state != Handshake::State::kDone) return;
  control.link = attempt->take_link();
  control.way = Way::kDirect;
  control.ping_sent.reset();
  control.ping_at = now + kPingInterval;
  take_holdings(w, attempt->take_holdings());
  shared_.log("worker " + control.peer.name + " is reached directly now.");
  // Drivers go on with the links they have until their new ones stand.
  for (Driver& driver : drivers_) {
    DataLink& data = driver.links[w];
    data.attempt.reset();
    data.handed_over = false;
    data.failures = 0;
    data.next_attempt = now;
  }
}

void Background::finish_attempt(WorkerIndex w, Handshake::State state, TimePoint now) {
  Control& control = controls_[w];
  const std::unique_ptr<Dial> attempt = std::move(control.attempt);
  if (state == Handshake::State::kFailed) return lose_control(w, attempt->error(), now);
  if (state == Handshake::State::kRefused) {
    {
      const MutexLock lock(shared_.mutex);
      shared_.fleet.on_refused(w, now);
    }
    if (attempt->error() != control.last_refusal) {
      control.last_refusal = attempt->error();
      shared_.log("worker " + control.peer.name + " cannot be used: " + control.last_refusal);
    }
    return;
  }
  control.link = attempt->take_link();
  control.way = attempt->way();
  control.direct.reset();
  control.direct_at = now + kDirectAgain;
  control.ping_at = now + kPingInterval;
  control.ping_sent.reset();
  control.last_refusal.clear();
  control.nothing_held_said = false;
  {
    const MutexLock lock(shared_.mutex);
    shared_.fleet.on_connected(w, attempt->round_trip());
  }
  take_holdings(w, attempt->take_holdings());
  if (control.way == Way::kRelay && !control.relayed_said) {
    control.relayed_said = true;
    if (has_way(control.peer, Way::kDirect))
      shared_.log("worker " + control.peer.name + " is used through the relay; its own address cannot be reached (yet).");
  }
  if (!control.peer.fingerprint && !is_loopback(control.peer.where.host) && !control.in_the_clear_said) {
    control.in_the_clear_said = true;
    shared_.log("worker " + control.peer.name +
                " is used without encryption; paste the whole link that it prints (host:port#fingerprint) to have it.");
  }
  if (control.was_up) add(shared_.stats.reconnects, 1);
  if (control.was_up || control.unreachable_said) shared_.log("worker " + control.peer.name + " is back.");
  control.was_up = true;
  control.unreachable_said = false;
}

void Background::take_holdings(WorkerIndex w, wire::Holdings holdings) {
  Control& control = controls_[w];
  control.held.clear();
  for (const wire::Holding& entry : holdings.entries) control.held.push_back({entry.layer_id, entry.group});
  control.nothing_held_said = false;
  const MutexLock lock(shared_.mutex);
  shared_.fleet.on_holdings(w, std::move(holdings));
}

void Background::lose_control(WorkerIndex w, const std::string& why, TimePoint now) {
  Control& control = controls_[w];
  const bool was_up = control.link != nullptr;
  control.attempt.reset();
  control.direct.reset();
  control.link.reset();
  std::vector<std::shared_ptr<Port>> ports;
  {
    const MutexLock lock(shared_.mutex);
    shared_.fleet.on_lost(w, now);
    ports = shared_.ports;
  }
  if (was_up) {
    add(shared_.stats.workers_lost, 1);
    for (const auto& port : ports) port->post({.worker = w, .link = nullptr});
    shared_.log("worker " + control.peer.name + " is lost (" + why + ") Its experts are computed elsewhere until it is back.");
  } else if (!control.unreachable_said) {
    control.unreachable_said = true;
    shared_.log("worker " + control.peer.name + " cannot be reached yet: " + why);
  }
}

void Background::read_control(WorkerIndex w, TimePoint now) {
  Link& link = *controls_[w].link;
  while (true) {
    Result<net::FrameReader::State> got = link.reader.read(*link.stream);
    if (!got) return lose_control(w, got.error().message, now);
    if (*got == net::FrameReader::State::kWouldBlock) break;
    if (*got == net::FrameReader::State::kEnd) return lose_control(w, "it closed the connection.", now);
    if (!on_control_frame(w, link.reader.frame(), now))
      return lose_control(w, "it broke the protocol on its control connection.", now);
  }
  if (Result<bool> flushed = link.writer.flush(*link.stream); !flushed) lose_control(w, flushed.error().message, now);
}

// False: the frame has no place here.
bool Background::on_control_frame(WorkerIndex w, const net::Frame& frame, TimePoint now) {
  Control& control = controls_[w];
  switch (frame.header.type) {
    case wire::FrameType::kPong: {
      const Result<wire::Pong> pong = wire::decode_pong(frame.payload);
      if (!pong || !control.ping_sent) return pong.has_value();
      control.ping_sent.reset();
      const MutexLock lock(shared_.mutex);
      const auto sent = TimePoint(Nanos(static_cast<std::int64_t>(pong->sent_ns)));
      shared_.fleet.on_pong(w, *pong, std::clamp(now - sent, Nanos(0), kPongMax), now);
      return true;
    }
    case wire::FrameType::kHoldings: {
      Result<wire::Holdings> holdings = wire::decode_holdings(frame.payload);
      if (!holdings) return false;
      take_holdings(w, *std::move(holdings));
      return true;
    }
    case wire::FrameType::kDrain: {
      {
        const MutexLock lock(shared_.mutex);
        shared_.fleet.on_draining(w);
      }
      shared_.log("worker " + control.peer.name + " is shutting down; it takes nothing new.");
      return true;
    }
    case wire::FrameType::kPing: {
      const Result<wire::Ping> ping = wire::decode_ping(frame.payload);
      if (!ping) return false;
      const Bytes pong = wire::encode_frame(wire::FrameType::kPong, frame.header.request_id,
                                            wire::Pong{.sent_ns = ping->sent_ns}, control.link->checksum());
      return control.link->writer.send(*control.link->stream, pong).has_value();
    }
    case wire::FrameType::kError: return true;  // the close that follows is what counts
    default: return false;
  }
}

void Background::ping(WorkerIndex w, TimePoint now) {
  Control& control = controls_[w];
  if (control.ping_sent && now - *control.ping_sent >= kPongMax)
    return lose_control(w, "it does not answer, though the connection is open.", now);
  if (now < control.ping_at) return;
  control.ping_at = now + kPingInterval;
  if (!control.ping_sent) control.ping_sent = now;
  const wire::Ping ping{.sent_ns = static_cast<std::uint64_t>(now.time_since_epoch().count())};
  const Bytes frame = wire::encode_frame(wire::FrameType::kPing, 0, ping, control.link->checksum());
  if (Status sent = control.link->writer.send(*control.link->stream, frame); !sent) lose_control(w, sent.error().message, now);
}

}  // namespace kvasir::dispatch
