#include "dispatch/client/round_bench.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <format>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "dispatch/dispatcher.h"
#include "net/connect.h"
#include "net/frame_io.h"
#include "net/tls.h"

namespace kvasir::dispatch {
namespace {

constexpr std::uint32_t kHeldPerUsed = 8;  // experts of the layer for each that is used
constexpr std::uint32_t kBlock = 50;       // rounds of one side before it is the other's turn
constexpr std::chrono::seconds kPatience{5};

// What travels.
struct Form {
  explicit Form(const RoundBench& bench)
      : sums(bench.form == RoundForm::kF16Sums), n_embd(bench.n_embd), top_k(bench.top_k) {}
  const bool sums;
  const std::uint32_t n_embd, top_k;
  wire::Numerics numerics() const { return sums ? wire::Numerics::kFast : wire::Numerics::kExact; }
  wire::RowType type() const { return sums ? wire::RowType::kF16 : wire::RowType::kF32; }
  std::uint32_t n_expert() const { return top_k * kHeldPerUsed; }
  std::uint32_t rows_back() const { return sums ? 1 : top_k; }
  std::size_t row_bytes() const { return *wire::row_bytes(type(), n_embd); }  // f32 and f16 know any width
  std::size_t out_bytes() const {
    return wire::kHeaderBytes + wire::kExecHeadBytes + top_k * (wire::kPairBytes + (sums ? sizeof(float) : 0)) +
           row_bytes();
  }
  std::size_t back_bytes() const { return wire::kHeaderBytes + wire::kResultHeadBytes + rows_back() * row_bytes(); }
};

// Accepts one connection after another and serves each on a thread.
class Far {
 public:
  Far(const Form& form, bool echo) : form_(form), echo_(echo) {}
  ~Far() {
    stop_ = true;
    if (acceptor_.joinable()) acceptor_.join();
    for (std::thread& thread : threads_) thread.join();
  }
  Status start(const net::TlsIdentity* tls) {
    if (tls != nullptr) {
      KVASIR_ASSIGN(tls_, net::TlsContext::server(*tls));
    }
    KVASIR_ASSIGN(listener_, net::listen_on({"127.0.0.1", 0}));
    acceptor_ = std::thread([this] { accept(); });
    return {};
  }
  std::uint16_t port() const { return listener_.port; }

 private:
  void accept() {
    while (!stop_) {
      pollfd entry{.fd = listener_.fd.get(), .events = POLLIN, .revents = 0};
      if (::poll(&entry, 1, 10) <= 0) continue;
      auto accepted = net::accept_from(listener_);
      if (accepted && *accepted)
        threads_.emplace_back(
            [this, fd = std::make_shared<net::Fd>(std::move((*accepted)->fd))] { serve(std::move(*fd)); });
    }
  }
  void serve(net::Fd fd) {
    std::unique_ptr<net::Stream> stream;
    if (!tls_) {
      stream = net::make_plain_stream(std::move(fd));
    } else if (auto made = net::make_tls_server_stream(std::move(fd), *tls_)) {
      stream = *std::move(made);
    } else {
      return;  // closes: the near end says so
    }
    if (echo_) serve_echo(*stream);
    else serve_frames(*stream);
  }
  bool wait(const net::Stream& stream) { return !stop_ && net::wait_ready(stream, 10).has_value(); }

  void serve_echo(net::Stream& stream) {
    std::vector<std::byte> in(form_.out_bytes()), out(form_.back_bytes());
    std::size_t have = 0;
    net::FrameWriter writer;
    while (true) {
      const auto got = stream.read_some(std::span(in).subspan(have));
      if (!got || got->state == net::IoState::kEnd) return;
      if (got->state == net::IoState::kWouldBlock) {
        if (!writer.flush(stream) || !wait(stream)) return;
        continue;
      }
      have += got->bytes;
      if (have < in.size()) continue;
      have = 0;
      if (!writer.send(stream, out)) return;
    }
  }

  void serve_frames(net::Stream& stream) {
    net::FrameReader reader;
    net::FrameWriter writer;
    const bool checksum = !stream.encrypted();
    const std::uint32_t n_rows = form_.rows_back();
    const Bytes rows(n_rows * form_.row_bytes());  // zeros in every type
    while (true) {
      const auto state = reader.read(stream);
      if (!state || *state == net::FrameReader::State::kEnd) return;
      if (*state == net::FrameReader::State::kWouldBlock) {
        if (!writer.flush(stream) || !wait(stream)) return;
        continue;
      }
      const net::Frame& frame = reader.frame();
      switch (frame.header.type) {
        case wire::FrameType::kHello: {
          auto hello = wire::decode_hello(frame.payload);
          if (!hello) return;
          hello->role = wire::Role::kWorker;
          if (!writer.send(stream, wire::encode_frame(wire::FrameType::kHello, 0, *hello, checksum))) return;
          wire::Holding entry{.layer_id = {},
                              .layer = 0,
                              .n_expert = form_.n_expert(),
                              .n_embd = form_.n_embd,
                              .experts = ExpertSet::all(form_.n_expert())};
          if (!writer.send(stream,
                           wire::encode_frame(wire::FrameType::kHoldings, 0, wire::Holdings{{entry}}, checksum)))
            return;
          break;
        }
        case wire::FrameType::kPing: {
          const auto ping = wire::decode_ping(frame.payload);
          if (!ping || !writer.send(stream, wire::encode_frame(wire::FrameType::kPong, 0,
                                                               wire::Pong{.sent_ns = ping->sent_ns}, checksum)))
            return;
          break;
        }
        case wire::FrameType::kExec: {
          const auto exec = wire::decode_exec(frame.payload);
          KVASIR_CHECK(exec.has_value() && exec->head.n_pairs == form_.top_k);
          const wire::ResultHead head{.row_type = form_.type(),
                                      .n_embd = form_.n_embd,
                                      .first_row = 0,
                                      .n_rows = n_rows,
                                      .total_rows = n_rows,
                                      .compute_us = 0};
          const Bytes prefix = wire::encode_result_prefix(frame.header.request_id, head, rows, false, checksum);
          if (!writer.send(stream, prefix, rows)) return;
          break;
        }
        default:
          break;
      }
    }
  }

  const Form form_;
  const bool echo_;
  std::optional<net::TlsContext> tls_;
  net::Listener listener_;
  std::atomic<bool> stop_{false};
  std::thread acceptor_;
  std::vector<std::thread> threads_;
};

class EchoClient {
 public:
  EchoClient(const Form& form, Nanos spin) : spin_(spin), out_(form.out_bytes()), in_(form.back_bytes()) {}
  Status connect(std::uint16_t port, const net::TlsIdentity* tls) {
    KVASIR_ASSIGN(net::Fd fd, net::connect_to({"127.0.0.1", port}, kPatience));
    if (tls == nullptr) {
      stream_ = net::make_plain_stream(std::move(fd));
      return {};
    }
    KVASIR_ASSIGN(context_, net::TlsContext::client());
    KVASIR_ASSIGN(stream_, net::make_tls_client_stream(std::move(fd), *context_, tls->fingerprint));
    return {};
  }
  Status round() {
    KVASIR_TRY(writer_.send(*stream_, out_));
    std::size_t have = 0;
    const TimePoint spin_until = monotonic_now() + spin_;
    while (have < in_.size()) {
      KVASIR_ASSIGN(const net::IoResult got, stream_->read_some(std::span(in_).subspan(have)));
      if (got.state == net::IoState::kEnd) return fatal("The far end of the echo has closed.");
      have += got.bytes;
      if (got.state == net::IoState::kWouldBlock) {
        KVASIR_TRY(writer_.flush(*stream_));
        if (monotonic_now() >= spin_until) KVASIR_TRY(net::wait_ready(*stream_, 1000));
      }
    }
    return {};
  }

 private:
  Nanos spin_;
  std::vector<std::byte> out_, in_;
  std::optional<net::TlsContext> context_;
  std::unique_ptr<net::Stream> stream_;
  net::FrameWriter writer_;
};

double quantile_us(std::vector<double>& ns, double q) {
  std::ranges::sort(ns);
  return ns[static_cast<std::size_t>(q * static_cast<double>(ns.size() - 1))] / 1000;
}

}  // namespace

Result<RoundFigures> measure_round(const RoundBench& bench) {
  const Form form(bench);
  std::optional<net::TlsIdentity> identity;
  if (bench.tls) {
    KVASIR_ASSIGN(identity, net::make_tls_identity());
  }
  const net::TlsIdentity* tls = identity ? &*identity : nullptr;
  Far worker(form, false), echo(form, true);
  KVASIR_TRY(worker.start(tls));
  KVASIR_TRY(echo.start(tls));
  EchoClient echo_client(form, bench.spin);
  KVASIR_TRY(echo_client.connect(echo.port(), tls));
  Options options;
  options.workers = {{"127.0.0.1", worker.port(), tls ? net::format_fingerprint(tls->fingerprint) : ""}};
  options.local = LocalPolicy::kNever;
  options.spin = bench.spin;
  options.numerics = form.numerics();
  options.row_type = options.result_type = form.type();
  KVASIR_ASSIGN(const auto dispatcher, Dispatcher::create(std::move(options)));
  wire::Recipe recipe;
  recipe.n_embd = form.n_embd;
  recipe.n_expert = form.n_expert();
  const Layer& layer = dispatcher->register_layer({}, 0, recipe);
  auto driver = dispatcher->make_driver();
  const std::vector<float> row(form.n_embd, 0.5f);
  const std::vector<float> weights(form.top_k, 0.125f);
  std::vector<float> out(std::size_t{form.top_k} * form.n_embd);
  std::vector<wire::Pair> pairs;
  for (std::uint32_t k = 0; k < form.top_k; ++k) pairs.push_back({0, k * (kHeldPerUsed - 1)});
  const Round round{.layer = &layer,
                    .rows = row.data(),
                    .row_stride = form.n_embd,
                    .n_rows = 1,
                    .pairs = pairs,
                    .weights = form.sums ? std::span(weights) : std::span<const float>(),
                    .out = out.data()};
  const LocalCompute local = [](const Round&, std::span<const std::uint32_t>) -> Status {
    return fatal("not expected");
  };

  std::vector<double> rounds, echoes;
  const auto timed = [&](std::vector<double>& into, auto&& once) -> Status {
    if (bench.gap > Nanos(0)) std::this_thread::sleep_for(bench.gap);
    const TimePoint start = monotonic_now();
    KVASIR_TRY(once());
    into.push_back(static_cast<double>((monotonic_now() - start).count()));
    return {};
  };
  // In blocks, so that with no gap each side runs back to back.
  while (rounds.size() < bench.rounds) {
    const std::size_t n = std::min<std::size_t>(kBlock, bench.rounds - rounds.size());
    for (std::size_t i = 0; i < n; ++i) KVASIR_TRY(timed(echoes, [&] { return echo_client.round(); }));
    for (std::size_t i = 0; i < n; ++i) KVASIR_TRY(timed(rounds, [&] { return driver->run(round, local); }));
  }
  return RoundFigures{.bytes_out = form.out_bytes(),
                      .bytes_back = form.back_bytes(),
                      .round_p50_us = quantile_us(rounds, 0.5),
                      .round_p99_us = quantile_us(rounds, 0.99),
                      .echo_p50_us = quantile_us(echoes, 0.5),
                      .echo_p99_us = quantile_us(echoes, 0.99)};
}

std::string_view to_string(RoundForm form) { return form == RoundForm::kExact ? "exact" : "f16 sums"; }

std::string to_json(const RoundBench& bench, const RoundFigures& f) {
  return std::format(
      R"({{"bench":"dispatch","form":"{}","stream":"{}","gap_ms":{},"spin_us":{},"n_embd":{},"top_k":{},"rounds":{},)"
      R"("bytes_out":{},"bytes_back":{},"round_p50_us":{:.1f},"echo_p50_us":{:.1f},"over_echo_p50_us":{:.1f},)"
      R"("round_p99_us":{:.1f},"echo_p99_us":{:.1f}}})",
      to_string(bench.form), bench.tls ? "tls" : "plain", std::chrono::duration<double, std::milli>(bench.gap).count(),
      std::chrono::duration_cast<std::chrono::microseconds>(bench.spin).count(), bench.n_embd, bench.top_k,
      bench.rounds, f.bytes_out, f.bytes_back, f.round_p50_us, f.echo_p50_us, f.over_echo_us(), f.round_p99_us,
      f.echo_p99_us);
}

}  // namespace kvasir::dispatch
