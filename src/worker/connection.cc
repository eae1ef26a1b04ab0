#include "worker/connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <format>
#include <thread>

#include "spdlog/spdlog.h"
#include "worker/greeting.h"
#include "worker/raw_session.h"

namespace kvasir::worker {
namespace {

using net::FrameReader;
using wire::ErrorCode;
using wire::FrameType;

// Enough to tell the framings, and our versions, apart: magic and version.
constexpr std::size_t kFirstBytes = 6;

}  // namespace

Connection::Connection(ServerCore& core, std::unique_ptr<net::Stream> stream, std::string peer)
    : core_(core),
      stream_(std::move(stream)),
      peer_(std::move(peer)),
      reader_(wire::payload_bytes_max(FrameType::kHello)),
      request_(core.budget, core.options.piece_pairs),
      incoming_(core.options.timeouts) {
  core_.store.subscribe(wake_);
  ++core_.stats.connections_open;
  ++core_.stats.connections_total;
}

Connection::~Connection() {
  core_.store.unsubscribe(wake_);
  --core_.stats.connections_open;
}

void Connection::cut() const { ::shutdown(stream_->fd(), SHUT_RDWR); }

void Connection::run() noexcept {
  try {
    const Status served = serve();
    if (served) {
      spdlog::debug("{}: closed after {} requests", peer_, n_answered_);
    } else {
      core_.log_of_peer(spdlog::level::warn, std::format("{}: dropped: {}", peer_, served.error().message));
    }
  } catch (const std::exception& e) {  // out of memory: this peer goes, the worker stays
    core_.log_of_peer(spdlog::level::err, std::format("{}: dropped: {}", peer_, e.what()));
  }
  for (Pending& pending : pending_) core_.gate.withdraw(pending.ticket);
  pending_.clear();
  recipes_.clear();  // an evicted layer waits for its last user
  upload_.reset();
  stream_->shutdown();
  cut();
  finished_ = true;
}

void Connection::turn_away(ErrorCode code, std::string why) noexcept {
  try {
    ++core_.stats.connections_refused;
    core_.log_of_peer(spdlog::level::warn, std::format("{}: refused: {}", peer_, why));
    if (send_error(0, code, std::move(why))) linger(*stream_, core_.options.timeouts.linger);
  } catch (const std::exception& e) {
    core_.log_of_peer(spdlog::level::err, std::format("{}: {}", peer_, e.what()));
  }
  cut();
  finished_ = true;
}

Status Connection::send_error(std::uint64_t request_id, ErrorCode code, std::string message) {
  return send(wire::encode_frame(FrameType::kError, request_id, wire::ErrorMessage{code, std::move(message)}, checksum()));
}

Status Connection::serve() {
  KVASIR_ASSIGN(const bool welcome, greet());
  if (!welcome) return {};
  return serve_frames();
}

Result<bool> Connection::greet() {
  const TimePoint deadline = monotonic_now() + core_.options.timeouts.hello;
  std::array<std::byte, kFirstBytes> first;
  KVASIR_ASSIGN(const bool open, read_whole(*stream_, first, deadline));
  if (!open) return false;
  if (load_le<std::uint32_t>(first.data()) != wire::kMagic) {
    greeted_ = true;
    KVASIR_TRY(serve_raw(core_, *stream_, wake_, first));
    return false;
  }
  const auto refuse = [&](ErrorCode code, std::string why) -> Result<bool> {
    turn_away(code, std::move(why));
    return false;
  };
  if (const auto version = load_le<std::uint16_t>(first.data() + 4); version != wire::kProtocolVersion)
    return refuse(ErrorCode::kWrongVersion,
                  std::format("This worker speaks protocol version {}, the backbone {}: update the older one.",
                              wire::kProtocolVersion, version));
  reader_.feed(first);
  FrameReader::State state;
  while (true) {
    KVASIR_ASSIGN(state, reader_.read(*stream_));
    if (state != FrameReader::State::kWouldBlock) break;
    if (monotonic_now() >= deadline) return retry_elsewhere("no HELLO came in time.");
    wait_for(stream_.get(), /*reading=*/true, nullptr, deadline);
  }
  if (state == FrameReader::State::kEnd) return false;
  if (reader_.frame().header.type != FrameType::kHello)
    return refuse(ErrorCode::kMalformed, "The first frame must be HELLO.");
  const Result<wire::Hello> hello = wire::decode_hello(reader_.frame().payload);
  if (!hello) return refuse(ErrorCode::kMalformed, hello.error().message);
  std::string_view token = core_.options.token;
  if (core_.options.grants && net::is_grant(hello->token)) {
    if (const auto granted = check_grant(hello->token); !granted)
      return refuse(ErrorCode::kUnauthorized, granted.error().message);
    token = {};
  }
  if (auto refusal = refuse_hello(*hello, core_.numerics_id, token, core_.store.files().plain()))
    return refuse(refusal->code, std::move(refusal->message));
  if (core_.draining) return refuse(ErrorCode::kDraining, "This worker is shutting down: use a replica.");

  greeted_ = true;
  same_numerics_ = core_.store.files().plain() && hello->numerics_id == core_.numerics_id;
  reader_.set_payload_bytes_max(wire::kFramePayloadBytesMax);
  wire::Hello ours;
  ours.role = wire::Role::kWorker;
  ours.numerics = hello->numerics;
  ours.software = core_.options.software;
  ours.numerics_id = core_.numerics_id;
  Bytes frames = wire::encode_frame(FrameType::kHello, 0, ours, checksum());
  store_version_ = core_.store.version();
  const Bytes holdings = wire::encode_frame(FrameType::kHoldings, 0, core_.store.holdings(), checksum());
  frames.insert(frames.end(), holdings.begin(), holdings.end());
  KVASIR_TRY(send(frames));
  spdlog::debug("{}: connected ({})", peer_, hello->software);
  return true;
}

Result<void> Connection::check_grant(std::string_view token) {
  const std::optional<net::TlsState> tls = net::tls_state(*stream_);
  if (!tls) return fix_input("A session grant is taken over TLS only.");
  const GrantCheck& check = *core_.options.grants;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto now_s = static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(now).count());
  KVASIR_ASSIGN(const net::Grant grant, net::check_grant(token, check.hub, check.worker_id, tls->binding, now_s));
  spdlog::debug("{}: granted to backbone {} for model {}", peer_, grant.backbone, grant.model);
  backbone_ = grant.backbone;
  return {};
}

Status Connection::serve_frames() {
  while (true) {
    if (core_.draining && !drain_said_) {
      drain_said_ = true;
      close_at_ = monotonic_now() + core_.options.timeouts.linger;
      KVASIR_TRY(send(wire::encode_empty_frame(FrameType::kDrain, 0)));
    }
    if (core_.store.version() != store_version_) KVASIR_TRY(follow_store());
    if (upload_ && monotonic_now() >= upload_->deadline) KVASIR_TRY(drop_stalled_upload());
    KVASIR_ASSIGN(const bool more, read_frames());
    if (ended_) return {};
    if (pending_ready()) {
      KVASIR_TRY(run_pending());
      continue;
    }
    if (pending_.empty() && monotonic_now() >= close_at_) return {};
    if (!more) KVASIR_TRY(wait_for_more());
  }
}

// Handles the frames that are there, a bounded number of them.
Result<bool> Connection::read_frames() {
  for (std::uint32_t n = 0; n < kFramesPerTurn && !ended_; ++n) {
    const Result<FrameReader::State> state = reader_.read(*stream_);
    if (!state) {
      // Damaged or malformed: say so if the peer still listens, then close.
      if (send_error(0, ErrorCode::kMalformed, state.error().message)) linger(*stream_, core_.options.timeouts.linger);
      return std::unexpected(state.error());
    }
    if (*state == FrameReader::State::kEnd) ended_ = true;
    if (*state != FrameReader::State::kFrame) {
      if (reader_.mid_frame()) incoming_.note(reader_.mid_frame_bytes(), reader_.mid_frame_bytes(), monotonic_now());
      else incoming_.end();
      return false;
    }
    incoming_.end();
    KVASIR_TRY(on_frame(reader_.frame()));
  }
  return !ended_;
}

Status Connection::wait_for_more() {
  const TimePoint now = monotonic_now();
  if (now < spin_until_ && pending_.empty()) {
    std::this_thread::yield();  // a peer that decodes sends its next request within microseconds
    return {};
  }
  TimePoint until = std::min(close_at_, now + std::chrono::hours(1));
  if (now >= incoming_.deadline()) return retry_elsewhere("it stopped in the middle of a frame.");
  until = std::min(until, incoming_.deadline());
  if (upload_) until = std::min(until, upload_->deadline);
  if (!reader_.mid_frame() && reader_.buffer_bytes() > kScratchBytesKept) reader_.shrink();
  wait_for(stream_.get(), /*reading=*/true, &wake_, until);
  return {};
}

Status Connection::malformed(const net::Frame& frame, std::string why) {
  if (send_error(frame.header.request_id, ErrorCode::kMalformed, why)) linger(*stream_, core_.options.timeouts.linger);
  return retry_elsewhere(std::move(why));
}

Status Connection::on_frame(const net::Frame& frame) {
  switch (frame.header.type) {
    case FrameType::kExec: return on_exec(frame);
    case FrameType::kCancel: return on_cancel(frame.header.request_id);
    case FrameType::kLayerRecipe: return on_layer_recipe(frame);
    case FrameType::kUpload: return on_upload(frame);
    case FrameType::kPing: {
      const Result<wire::Ping> ping = wire::decode_ping(frame.payload);
      if (!ping) return malformed(frame, ping.error().message);
      const auto wait = std::chrono::ceil<std::chrono::microseconds>(core_.gate.waiting_time()).count();
      const wire::Pong pong{.sent_ns = ping->sent_ns,
                            .queued = core_.gate.waiting(),
                            .wait_us = static_cast<std::uint32_t>(std::clamp<std::int64_t>(wait, 0, UINT32_MAX)),
                            .busy_permille = core_.stats.busy_permille(core_.gate, monotonic_now()),
                            .row_us = core_.stats.costs.pair_us()};
      return send(wire::encode_frame(FrameType::kPong, frame.header.request_id, pong, checksum()));
    }
    case FrameType::kDrain:  // the backbone is leaving: it will close when it has its answers
    case FrameType::kError: return {};
    default:
      return malformed(frame, std::format("A backbone does not send frames of type {}.", static_cast<int>(frame.header.type)));
  }
}

Status Connection::on_layer_recipe(const net::Frame& frame) {
  Result<wire::LayerRecipe> message = wire::decode_layer_recipe(frame.payload);
  const std::uint64_t request_id = frame.header.request_id;
  if (!message) return send_error(request_id, ErrorCode::kUnsupportedRecipe, message.error().message);
  recipes_.erase(message->recipe_id);
  HeldLayerPtr layer = core_.store.find(message->layer_id);
  if (!layer) {
    // Bound all the same: an upload may bring it.
    recipes_.insert_or_assign(message->recipe_id, Bound{message->layer_id, {message->recipe, nullptr}});
    return send_error(request_id, ErrorCode::kUnknownLayer, kLayerNotHeld);
  }
  if (const Status fits = check_fit(message->recipe, *layer); !fits)
    return send_error(request_id, ErrorCode::kUnsupportedRecipe, fits.error().message);
  recipes_.insert_or_assign(message->recipe_id, Bound{message->layer_id, {message->recipe, std::move(layer)}});
  return {};
}

}  // namespace kvasir::worker
