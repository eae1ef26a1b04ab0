#include "dispatch/client/handshake.h"

#include <poll.h>

#include <algorithm>
#include <array>

namespace kvasir::dispatch {

bool protocol_was_broken(Link& link) {
  std::array<std::byte, 1> probe;
  const Result<net::IoResult> after = link.stream->read_some(probe);
  return after && after->state != net::IoState::kEnd;
}

bool is_loopback(const std::string& host) { return net::is_loopback_host(host); }

namespace {

// Which part of the numerics ids differs, in words; empty if none does.
std::string numerics_difference(const wire::NumericsId& ours, const wire::NumericsId& theirs) {
  if (ours.ggml_version != theirs.ggml_version)
    return "it computes with ggml " + theirs.ggml_version + ", this backbone with " + ours.ggml_version;
  if (ours.cpu_variant != theirs.cpu_variant)
    return "it computes with the CPU variant " + theirs.cpu_variant + ", this backbone with " + ours.cpu_variant;
  if (ours.probe != theirs.probe) return "its answer to the fixed probe differs from this backbone's";
  return {};
}

// A node token leaves this process only encrypted or on this machine.
wire::Hello hello_for(const Peer& peer, wire::Hello hello) {
  if (!peer.fingerprint && !peer.where.host.empty() && !is_loopback(peer.where.host)) hello.token.clear();
  return hello;
}

}  // namespace

std::string worker_name(const WorkerAddress& worker) {
  return worker.host.empty() ? "relay:" + worker.relay : net::format_host_port({worker.host, worker.port});
}

Handshake::Handshake(const Peer& peer, const wire::Hello& hello, const net::TlsContext* tls, TimePoint now, Way way)
    : peer_(peer), hello_(hello_for(peer, hello)), tls_(tls), way_(way), deadline_(now + kHandshakeMax) {}

int Handshake::fd() const { return link_ ? link_->stream->fd() : socket_.get(); }

short Handshake::wants() const {
  if (!link_) return POLLOUT;
  return link_->stream->wants();  // of what a blocked HELLO waits for, too: TLS, or a relay's answer
}

Handshake::State Handshake::fail(State state, std::string error) {
  error_ = std::move(error);
  const bool goes_on = follow();
  relayed_ = nullptr;
  link_.reset();
  socket_.reset();
  return goes_on ? start_next(monotonic_now()) : state;
}

bool Handshake::follow() {
  if (relayed_ == nullptr || moved_ || relayed_->moved_to().empty()) return false;
  Result<net::RelayDialer> there = peer_.relay->at(relayed_->moved_to());
  if (!there) {
    error_ = std::move(there).error().message;
    return false;
  }
  Result<std::vector<net::Address>> addresses = net::resolve(there->dial_address());
  if (!addresses) {
    error_ = std::move(addresses).error().message;
    return false;
  }
  moved_ = *std::move(there);
  moved_addresses_ = *std::move(addresses);
  next_address_ = 0;
  phase_ = Phase::kStart;
  return true;
}

Handshake::State Handshake::step(TimePoint now) {
  if (phase_ == Phase::kStart) return start_next(now);
  if (phase_ == Phase::kConnecting) {
    pollfd entry{.fd = socket_.get(), .events = POLLOUT, .revents = 0};
    if (::poll(&entry, 1, 0) <= 0) return now >= address_until_ ? start_next(now) : State::kPending;
    if (Status stands = net::finish_connect(socket_.get(), addresses()[next_address_ - 1]); !stands) {
      error_ = std::move(stands).error().message;
      return start_next(now);
    }
    return open_stream(now);
  }
  if (now >= deadline_)
    return fail(State::kFailed, "it accepted the connection but did not greet within " +
                                    std::to_string(std::chrono::duration_cast<std::chrono::seconds>(kHandshakeMax).count()) + " s.");
  if (phase_ == Phase::kTls) return send_hello(now);
  if (Result<bool> flushed = link_->writer.flush(*link_->stream); !flushed)
    return fail(State::kFailed, std::move(flushed).error().message);
  return read_frames(now);
}

Handshake::State Handshake::start_next(TimePoint now) {
  while (next_address_ < addresses().size() && now < deadline_) {
    const auto left = static_cast<std::int64_t>(addresses().size() - next_address_);
    Result<net::Fd> started = net::start_connect(addresses()[next_address_++]);
    if (!started) {
      error_ = std::move(started).error().message;
      continue;
    }
    socket_ = *std::move(started);
    address_until_ = now + (deadline_ - now) / left;
    phase_ = Phase::kConnecting;
    return State::kPending;
  }
  return fail(State::kFailed, error_.empty() ? "no connection within the time allowed." : error_);
}

Handshake::State Handshake::open_stream(TimePoint now) {
  link_ = std::make_unique<Link>();
  Result<std::unique_ptr<net::Stream>> stream = make_stream();
  if (!stream) return fail(State::kFailed, std::move(stream).error().message);
  link_->stream = *std::move(stream);
  // A worker without an id gets no grant, and TLS is what a grant is bound to.
  if (peer_.grants != nullptr && peer_.fingerprint && !peer_.where.id.empty()) grant_ = peer_.grants->find(peer_.where.id);
  phase_ = Phase::kTls;
  return send_hello(now);
}

Handshake::State Handshake::send_hello(TimePoint now) {
  if (!grant_.empty()) {
    if (const auto moved = link_->stream->write_some({}); !moved) return fail(State::kFailed, moved.error().message);
    const std::optional<net::TlsState> tls = net::tls_state(*link_->stream);
    if (!tls) return State::kPending;
    hello_.token = net::prove_grant(grant_, peer_.grants->key, tls->binding);
  }
  hello_sent_ = now;
  const Bytes frame = wire::encode_frame(wire::FrameType::kHello, 0, hello_, link_->checksum());
  if (Status sent = link_->writer.send(*link_->stream, frame); !sent)
    return fail(State::kFailed, std::move(sent).error().message);
  phase_ = Phase::kHello;
  return State::kPending;
}

Result<std::unique_ptr<net::Stream>> Handshake::make_stream() {
  if (way_ == Way::kRelay) {
    // Whoever keeps the relay must not be able to read or forge what passes it.
    if (!peer_.fingerprint)
      return fix_input("a worker is used through a relay only with its fingerprint; paste the whole link that it prints.");
    const net::RelayDialer& relay = moved_ ? *moved_ : *peer_.relay;
    KVASIR_ASSIGN(auto relayed, relay.open(std::move(socket_), peer_.where.relay, net::RelayDialer::Payload::kCiphertext));
    const net::WebSocketStream* const below = relayed.get();
    KVASIR_ASSIGN(auto stream, net::make_tls_client_stream(std::move(relayed), *tls_, *peer_.fingerprint));
    relayed_ = below;
    return stream;
  }
  std::unique_ptr<net::Stream> lower = net::make_plain_stream(std::move(socket_));
  if (!peer_.fingerprint) return lower;
  return net::make_tls_client_stream(std::move(lower), *tls_, *peer_.fingerprint);
}

Handshake::State Handshake::read_frames(TimePoint now) {
  while (true) {
    Result<net::FrameReader::State> got = link_->reader.read(*link_->stream);
    if (!got) return fail(protocol_was_broken(*link_) ? State::kRefused : State::kFailed, std::move(got).error().message);
    if (*got == net::FrameReader::State::kWouldBlock) return State::kPending;
    if (*got == net::FrameReader::State::kEnd)
      return fail(State::kFailed, "it closed the connection before it greeted.");
    const net::Frame& frame = link_->reader.frame();
    switch (frame.header.type) {
      case wire::FrameType::kError: {
        const Result<wire::ErrorMessage> refusal = wire::decode_error(frame.payload);
        if (refusal && refusal->code == wire::ErrorCode::kUnauthorized && !grant_.empty() && peer_.grants->refused) {
          peer_.grants->refused(peer_.where.id);
          return fail(State::kFailed, "it refuses the session grant: " + refusal->message + " Its ticket is shown next.");
        }
        return fail(State::kRefused, refusal ? refusal->message : refusal.error().message);
      }
      case wire::FrameType::kHello:
        if (phase_ != Phase::kHello) return fail(State::kRefused, "it greeted twice.");
        if (const State state = on_hello(frame.payload, now); state != State::kPending) return state;
        break;
      case wire::FrameType::kHoldings: {
        if (phase_ != Phase::kHoldings) return fail(State::kRefused, "it listed its experts before it greeted.");
        Result<wire::Holdings> holdings = wire::decode_holdings(frame.payload);
        if (!holdings) return fail(State::kRefused, std::move(holdings).error().message);
        holdings_ = *std::move(holdings);
        return State::kDone;
      }
      default: return fail(State::kRefused, "it did not begin with a greeting; is this the port of a Kvasir worker?");
    }
  }
}

Handshake::State Handshake::on_hello(ByteSpan payload, TimePoint now) {
  Result<wire::Hello> hello = wire::decode_hello(payload);
  if (!hello) return fail(State::kRefused, std::move(hello).error().message);
  if (hello->role != wire::Role::kWorker) return fail(State::kRefused, "it is not a worker; check the address.");
  if (hello->numerics != hello_.numerics) return fail(State::kRefused, "it does not offer the numerics asked for.");
  if (hello_.numerics != wire::Numerics::kFast) {
    const std::string difference = numerics_difference(hello_.numerics_id, hello->numerics_id);
    if (!difference.empty())
      return fail(State::kRefused, difference + "; run the same build on both, or choose KVASIR_NUMERICS=fast.");
  }
  round_trip_ = now - hello_sent_;
  phase_ = Phase::kHoldings;
  return State::kPending;
}

}  // namespace kvasir::dispatch
