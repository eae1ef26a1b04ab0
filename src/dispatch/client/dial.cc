#include "dispatch/client/dial.h"

#include <algorithm>

namespace kvasir::dispatch {

using State = Handshake::State;

Dial::Dial(const Peer& peer, const wire::Hello& hello, const net::TlsContext* tls, TimePoint now, std::optional<Way> only)
    : direct_until_(now + kDirectHeadStart) {
  if (has_way(peer, Way::kDirect) && only != Way::kRelay)
    direct_ = std::make_unique<Handshake>(peer, hello, tls, now, Way::kDirect);
  if (has_way(peer, Way::kRelay) && only != Way::kDirect)
    relayed_ = std::make_unique<Handshake>(peer, hello, tls, now, Way::kRelay);
}

State Dial::win(std::unique_ptr<Handshake>& attempt, Way way) {
  winner_ = std::move(attempt);
  way_ = way;
  direct_.reset();
  relayed_.reset();
  return State::kDone;
}

void Dial::lose(std::unique_ptr<Handshake>& attempt, State state, std::string_view prefix) {
  refused_ = refused_ || state == State::kRefused;
  if (!error_.empty()) error_ += " ";
  error_ += std::string(prefix) + attempt->error();
  attempt.reset();
}

State Dial::step(TimePoint now) {
  if (direct_) {
    const State state = direct_->step(now);
    if (state == State::kDone) return win(direct_, Way::kDirect);
    if (state != State::kPending) lose(direct_, state, "");
  }
  if (relayed_ && !relayed_done_) {
    const State state = relayed_->step(now);
    if (state == State::kDone) relayed_done_ = true;
    else if (state != State::kPending) lose(relayed_, state, "By the relay: ");
  }
  if (relayed_done_ && (!direct_ || now >= direct_until_)) return win(relayed_, Way::kRelay);
  if (direct_ || relayed_) return State::kPending;
  if (error_.empty()) error_ = "it has no address.";
  return refused_ ? State::kRefused : State::kFailed;
}

void Dial::gather(std::vector<pollfd>& fds, TimePoint& wake) const {
  for (const Handshake* attempt : {direct_.get(), relayed_done_ ? nullptr : relayed_.get()})
    if (attempt != nullptr) fds.push_back({.fd = attempt->fd(), .events = attempt->wants(), .revents = 0});
  if (relayed_done_) wake = std::min(wake, direct_until_);
}

}  // namespace kvasir::dispatch
