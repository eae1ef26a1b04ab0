#include "dispatch/client/fake_worker.h"

#include <poll.h>

#include <algorithm>
#include <bit>
#include <chrono>

#include "base/check.h"

namespace kvasir::dispatch {
namespace {

constexpr int kLook_ms = 5;

bool take(std::atomic<int>& count) {
  int n = count.load();
  while (n > 0)
    if (count.compare_exchange_weak(n, n - 1)) return true;
  return false;
}

}  // namespace

FakeWorker::FakeWorker(wire::LayerId layer, ExpertSet experts, std::uint32_t n_embd, const net::TlsIdentity* tls)
    : layer_(layer), experts_(std::move(experts)), n_embd_(n_embd) {
  if (tls != nullptr) {
    auto context = net::TlsContext::server(*tls);
    KVASIR_CHECK(context.has_value());
    tls_ = *std::move(context);
  }
  restart();
}

FakeWorker::~FakeWorker() { stop(); }

void FakeWorker::restart() {
  stop_ = false;
  auto listener = net::listen_on({"127.0.0.1", port_});
  KVASIR_CHECK(listener.has_value());
  listener_ = *std::move(listener);
  port_ = listener_.port;
  acceptor_ = std::thread([this] { accept_loop(); });
}

void FakeWorker::stop() {
  stop_ = true;
  if (acceptor_.joinable()) acceptor_.join();
  listener_.fd.reset();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void FakeWorker::drain() { ++drain_epoch_; }

void FakeWorker::accept_loop() {
  while (!stop_) {
    pollfd entry{.fd = listener_.fd.get(), .events = POLLIN, .revents = 0};
    if (::poll(&entry, 1, kLook_ms) <= 0) continue;
    auto accepted = net::accept_from(listener_);
    if (!accepted || !*accepted) continue;
    ++connections;
    threads_.emplace_back([this, fd = std::make_shared<net::Fd>(std::move((*accepted)->fd))] { serve(std::move(*fd)); });
  }
}

void FakeWorker::serve(net::Fd fd) {
  Connection c;
  if (tls_) {
    auto stream = net::make_tls_server_stream(std::move(fd), *tls_);
    if (!stream) return;
    c.stream = *std::move(stream);
  } else {
    c.stream = net::make_plain_stream(std::move(fd));
  }
  int drained = drain_epoch_;
  while (!stop_) {
    if (faults.frozen) {
      std::this_thread::sleep_for(std::chrono::milliseconds(kLook_ms));
      continue;
    }
    if (drain_epoch_ != drained) {
      drained = drain_epoch_;
      if (!send(c, wire::encode_empty_frame(wire::FrameType::kDrain, 0))) return;
    }
    auto state = c.reader.read(*c.stream);
    if (!state || *state == net::FrameReader::State::kEnd) return;
    if (!c.writer.flush(*c.stream)) return;
    if (*state == net::FrameReader::State::kFrame) {
      if (!on_frame(c, c.reader.frame())) return;
      continue;
    }
    pollfd entry{.fd = c.stream->fd(), .events = c.stream->wants(), .revents = 0};
    if (!c.writer.idle(*c.stream)) entry.events |= POLLOUT;
    ::poll(&entry, 1, kLook_ms);
  }
}

bool FakeWorker::on_frame(Connection& c, const net::Frame& frame) {
  const bool checksum = !c.stream->encrypted();
  switch (frame.header.type) {
    case wire::FrameType::kHello: {
      auto hello = wire::decode_hello(frame.payload);
      if (!hello) return false;
      if (faults.refuse_hello) {
        send(c, wire::encode_frame(wire::FrameType::kError, 0,
                                   wire::ErrorMessage{wire::ErrorCode::kNumerics, "this worker computes otherwise; use the same build."},
                                   checksum));
        return false;
      }
      hello->role = wire::Role::kWorker;
      if (!send(c, wire::encode_frame(wire::FrameType::kHello, 0, *hello, checksum))) return false;
      wire::Holding entry{.layer_id = layer_, .layer = 0, .n_expert = 64, .n_embd = n_embd_, .experts = experts_};
      return send(c, wire::encode_frame(wire::FrameType::kHoldings, 0, wire::Holdings{{entry}}, checksum));
    }
    case wire::FrameType::kPing: {
      auto ping = wire::decode_ping(frame.payload);
      return ping && send(c, wire::encode_frame(wire::FrameType::kPong, 0, wire::Pong{.sent_ns = ping->sent_ns}, checksum));
    }
    case wire::FrameType::kExec: {
      ++execs;
      auto exec = wire::decode_exec(frame.payload);
      if (!exec) return false;
      rows_received += exec->head.n_rows;
      return faults.swallow || answer(c, frame.header.request_id, *exec);
    }
    case wire::FrameType::kCancel: ++cancels; return true;
    default: return true;
  }
}

void FakeWorker::tell_lie(const wire::ExecView& exec, std::span<float> rows) {
  if (faults.lie == Lie::kNone) return;  // sums have other rows
  const std::uint32_t victim = exec.head.n_pairs / 2;
  const std::span<float> row = rows.subspan(std::size_t{victim} * n_embd_, n_embd_);
  const std::vector<float> honest(row.begin(), row.end());
  const auto scale = [&](float by) {
    for (float& value : row) value *= by;
  };
  switch (faults.lie.load()) {
    case Lie::kNone: break;
    case Lie::kFlippedBit: row[3] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(row[3]) ^ 1u); break;
    case Lie::kNormOff1: scale(1.01f); break;
    case Lie::kNormOff5: scale(1.05f); break;
    case Lie::kOlderAnswer: {
      const MutexLock lock(older_mutex_);
      if (!older_.empty()) std::ranges::copy(older_, row.begin());
      older_ = honest;
      break;
    }
    case Lie::kOtherExpert: {
      const float expert = static_cast<float>(exec.pair(victim).expert);
      for (float& value : row) value = (value - 0.5f) / (expert + 1) * (expert + 2) + 0.5f;
      break;
    }
    case Lie::kHuge: row[0] = 1e13f; break;
  }
}

bool FakeWorker::answer(Connection& c, std::uint64_t id, const wire::ExecView& exec) {
  const bool checksum = !c.stream->encrypted();
  if (const auto delay = faults.delay_ns.load(); delay > 0) std::this_thread::sleep_for(Nanos(delay));
  if (take(faults.busy))
    return send(c, wire::encode_frame(wire::FrameType::kError, id, wire::ErrorMessage{wire::ErrorCode::kBusy, "the queue is full."}, checksum));
  const bool sums = exec.head.result_kind == wire::ResultKind::kWeightedSum;
  const std::uint32_t n = sums ? exec.head.n_rows : exec.head.n_pairs;
  std::vector<float> rows(std::size_t{n} * n_embd_), in(n_embd_);
  const std::size_t row_in = *wire::row_bytes(exec.head.row_type, n_embd_);
  const std::size_t row_out = *wire::row_bytes(exec.head.result_type, n_embd_);
  for (std::uint32_t i = 0; i < exec.head.n_pairs; ++i) {
    const wire::Pair pair = exec.pair(i);
    wire::decode_row(exec.head.row_type, exec.rows.subspan(pair.row * row_in, row_in), in);
    for (std::uint32_t j = 0; j < n_embd_; ++j) {
      const float value = fake_expert(in[j], pair.expert);
      if (sums) rows[std::size_t{pair.row} * n_embd_ + j] += exec.weight(i) * value;
      else rows[std::size_t{i} * n_embd_ + j] = value;
    }
  }
  tell_lie(exec, rows);
  if (take(faults.nan)) rows[rows.size() / 2] = std::numeric_limits<float>::quiet_NaN();
  Bytes encoded(n * row_out);
  for (std::uint32_t i = 0; i < n; ++i)
    wire::encode_row(exec.head.result_type, std::span(rows).subspan(std::size_t{i} * n_embd_, n_embd_),
                     std::span(encoded).subspan(i * row_out, row_out));
  const std::uint32_t per_frame = faults.rows_per_frame > 0 ? faults.rows_per_frame.load() : n;
  const int copies = take(faults.twice) ? 2 : 1;
  const std::uint32_t extra = take(faults.wrong_count) ? 1 : 0;
  for (int copy = 0; copy < copies; ++copy) {
    for (std::uint32_t first = 0; first < n; first += per_frame) {
      const std::uint32_t count = std::min(per_frame, n - first);
      const ByteSpan bytes = ByteSpan(encoded).subspan(first * row_out, count * row_out);
      const wire::ResultHead head{.row_type = exec.head.result_type, .n_embd = n_embd_, .first_row = first, .n_rows = count, .total_rows = n + extra, .compute_us = 1};
      Bytes frame = wire::encode_result_prefix(id, head, bytes, first + count < n, checksum);
      frame.insert(frame.end(), bytes.begin(), bytes.end());
      if (take(faults.bad_checksum)) frame.back() ^= std::byte{1};
      if (take(faults.close_mid_frame)) {
        frame.resize(frame.size() / 2);
        send(c, frame);
        return false;
      }
      if (!send(c, frame)) return false;
    }
  }
  return true;
}

}  // namespace kvasir::dispatch
