// dispatch_round_bench: what a layer round costs over an echo of the same bytes.
//
// One row through 8 experts, n_embd 3072: exact (f32, one row per pair: 12 KB out, 98 KB back)
// and fast with f16 sums (6 KB each way). The far end is a thread of this process that answers at once, without computing.
// Both sides run in turn, in the same run, over the same kind of stream, with the same spin
// on the near end, at gaps of 0 and 5 ms between rounds. One JSON object a line.
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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

constexpr std::uint32_t kWidth = 3072;
constexpr std::uint32_t kTopK = 8;
constexpr std::uint32_t kExperts = 64;

// What travels.
struct Form {
  const char* name;
  wire::Numerics numerics;
  wire::RowType type;
  bool sums;
  std::size_t row_bytes() const { return *wire::row_bytes(type, kWidth); }
  std::size_t out_bytes() const {
    return wire::kHeaderBytes + wire::kExecHeadBytes + kTopK * (wire::kPairBytes + (sums ? sizeof(float) : 0)) + row_bytes();
  }
  std::size_t back_bytes() const { return wire::kHeaderBytes + wire::kResultHeadBytes + (sums ? 1 : kTopK) * row_bytes(); }
};
constexpr Form kForms[] = {{"exact", wire::Numerics::kExact, wire::RowType::kF32, false},
                           {"f16 sums", wire::Numerics::kFast, wire::RowType::kF16, true}};

// Accepts one connection after another and serves each on a thread.
class Far {
 public:
  Far(const net::TlsIdentity* tls, const Form& form, bool echo) : form_(form), echo_(echo) {
    if (tls != nullptr) tls_ = net::TlsContext::server(*tls).value();
    listener_ = net::listen_on({"127.0.0.1", 0}).value();
    acceptor_ = std::thread([this] {
      while (!stop_) {
        pollfd entry{.fd = listener_.fd.get(), .events = POLLIN, .revents = 0};
        if (::poll(&entry, 1, 10) <= 0) continue;
        auto accepted = net::accept_from(listener_);
        if (accepted && *accepted)
          threads_.emplace_back([this, fd = std::make_shared<net::Fd>(std::move((*accepted)->fd))] { serve(std::move(*fd)); });
      }
    });
  }
  ~Far() {
    stop_ = true;
    acceptor_.join();
    for (std::thread& thread : threads_) thread.join();
  }
  std::uint16_t port() const { return listener_.port; }

 private:
  void serve(net::Fd fd) {
    auto stream = tls_ ? net::make_tls_server_stream(std::move(fd), *tls_).value() : net::make_plain_stream(std::move(fd));
    if (echo_) serve_echo(*stream); else serve_frames(*stream);
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
    const std::uint32_t n_rows = form_.sums ? 1 : kTopK;
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
          auto hello = wire::decode_hello(frame.payload).value();
          hello.role = wire::Role::kWorker;
          if (!writer.send(stream, wire::encode_frame(wire::FrameType::kHello, 0, hello, checksum))) return;
          wire::Holding entry{.layer_id = {}, .layer = 0, .n_expert = kExperts, .n_embd = kWidth, .experts = ExpertSet::all(kExperts)};
          if (!writer.send(stream, wire::encode_frame(wire::FrameType::kHoldings, 0, wire::Holdings{{entry}}, checksum))) return;
          break;
        }
        case wire::FrameType::kPing: {
          const auto ping = wire::decode_ping(frame.payload).value();
          if (!writer.send(stream, wire::encode_frame(wire::FrameType::kPong, 0, wire::Pong{.sent_ns = ping.sent_ns}, checksum))) return;
          break;
        }
        case wire::FrameType::kExec: {
          const auto exec = wire::decode_exec(frame.payload);
          KVASIR_CHECK(exec.has_value() && exec->head.n_pairs == kTopK);
          const wire::ResultHead head{.row_type = form_.type, .n_embd = kWidth, .first_row = 0, .n_rows = n_rows, .total_rows = n_rows, .compute_us = 0};
          const Bytes prefix = wire::encode_result_prefix(frame.header.request_id, head, rows, false, checksum);
          if (!writer.send(stream, prefix, rows)) return;
          break;
        }
        default: break;
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
  EchoClient(const Far& far, const net::TlsIdentity* tls, const Form& form, Nanos spin)
      : spin_(spin), out_(form.out_bytes()), in_(form.back_bytes()) {
    net::Fd fd = net::connect_to({"127.0.0.1", far.port()}, std::chrono::seconds(5)).value();
    if (tls != nullptr) {
      context_ = net::TlsContext::client().value();
      stream_ = net::make_tls_client_stream(std::move(fd), *context_, tls->fingerprint).value();
    } else {
      stream_ = net::make_plain_stream(std::move(fd));
    }
  }
  void round() {
    KVASIR_CHECK(writer_.send(*stream_, out_).has_value());
    std::size_t have = 0;
    const TimePoint spin_until = monotonic_now() + spin_;
    while (have < in_.size()) {
      const auto got = stream_->read_some(std::span(in_).subspan(have)).value();
      KVASIR_CHECK(got.state != net::IoState::kEnd);
      have += got.bytes;
      if (got.state == net::IoState::kWouldBlock) {
        KVASIR_CHECK(writer_.flush(*stream_).has_value());
        if (monotonic_now() >= spin_until) KVASIR_CHECK(net::wait_ready(*stream_, 1000).has_value());
      }
    }
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

void measure(const Form& form, bool with_tls, Nanos gap, Nanos spin, int n) {
  const auto identity = net::make_tls_identity();
  const net::TlsIdentity* tls = with_tls ? &*identity : nullptr;
  Far worker(tls, form, false), echo(tls, form, true);
  EchoClient echo_client(echo, tls, form, spin);
  Options options;
  options.workers = {{"127.0.0.1", worker.port(), with_tls ? net::format_fingerprint(identity->fingerprint) : ""}};
  options.local = LocalPolicy::kNever;
  options.spin = spin;
  options.numerics = form.numerics;
  options.row_type = options.result_type = form.type;
  auto dispatcher = Dispatcher::create(std::move(options)).value();
  wire::Recipe recipe;
  recipe.n_embd = kWidth;
  recipe.n_expert = kExperts;
  const Layer& layer = dispatcher->register_layer({}, 0, recipe);
  auto driver = dispatcher->make_driver();
  const std::vector<float> row(kWidth, 0.5f);
  const std::vector<float> weights(kTopK, 0.125f);
  std::vector<float> out(std::size_t{kTopK} * kWidth);
  std::vector<wire::Pair> pairs;
  for (std::uint32_t k = 0; k < kTopK; ++k) pairs.push_back({0, k * 7});
  const Round round{.layer = &layer, .rows = row.data(), .row_stride = kWidth, .n_rows = 1, .pairs = pairs,
                    .weights = form.sums ? std::span(weights) : std::span<const float>(), .out = out.data()};
  const LocalCompute local = [](const Round&, std::span<const std::uint32_t>) -> Status { return fatal("not expected"); };

  std::vector<double> rounds, echoes;
  const auto timed = [&](std::vector<double>& into, auto&& once) {
    if (gap > Nanos(0)) std::this_thread::sleep_for(gap);
    const TimePoint start = monotonic_now();
    once();
    into.push_back(static_cast<double>((monotonic_now() - start).count()));
  };
  // In blocks, so that with no gap each side runs back to back.
  constexpr int kBlock = 50;
  for (int done = 0; done < n; done += kBlock) {
    for (int i = 0; i < kBlock; ++i) timed(echoes, [&] { echo_client.round(); });
    for (int i = 0; i < kBlock; ++i) timed(rounds, [&] { KVASIR_CHECK(driver->run(round, local).has_value()); });
  }
  const double round_p50 = quantile_us(rounds, 0.5), echo_p50 = quantile_us(echoes, 0.5);
  std::printf(R"({"bench":"round","form":"%s","stream":"%s","gap_ms":%lld,"spin_us":%lld,"round_p50_us":%.1f,"echo_p50_us":%.1f,"over_echo_p50_us":%.1f,"round_p99_us":%.1f,"echo_p99_us":%.1f})" "\n",
              form.name, with_tls ? "tls" : "plain", static_cast<long long>(gap.count() / 1'000'000), static_cast<long long>(spin.count() / 1000),
              round_p50, echo_p50, round_p50 - echo_p50, quantile_us(rounds, 0.99), quantile_us(echoes, 0.99));
  std::fflush(stdout);
}

}  // namespace
}  // namespace kvasir::dispatch

int main(int argc, char** argv) {
  using namespace std::chrono_literals;
  const auto spin = std::chrono::microseconds(argc > 1 ? std::atoi(argv[1]) : 50);
  for (const auto& form : kvasir::dispatch::kForms)
    for (const bool tls : {false, true})
      for (const kvasir::Nanos gap : {kvasir::Nanos(0), kvasir::Nanos(5ms)})
        kvasir::dispatch::measure(form, tls, gap, spin, gap > kvasir::Nanos(0) ? 400 : 4000);
}
