// relay_bench: a layer round through the relay against the same bytes on a direct connection.
//
// Loopback, n_embd 3072, f16 rows, 8 experts a row, weighted sums back; the far end answers at
// once without computing. Both ends speak TLS to each other in both cases, as they always do.
// In one run, alternating: one row back to back and after 5 ms of idleness, and 64-row batches.
// One JSON object a line, then the comparison.
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <format>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "hub/http/hub.h"
#include "hub/http/server.h"
#include "net/connect.h"
#include "net/frame_io.h"
#include "net/tls.h"
#include "net/websocket.h"
#include "wire/messages.h"

namespace kvasir::hub {
namespace {

constexpr std::uint32_t kWidth = 3072;
constexpr std::uint32_t kTopK = 8;
constexpr Nanos kSpin = std::chrono::microseconds(50);
constexpr Nanos kPatience = std::chrono::seconds(10);

std::size_t bytes_out(std::size_t rows) {
  return wire::kHeaderBytes + wire::kExecHeadBytes + rows * (kTopK * (wire::kPairBytes + sizeof(float)) + kWidth * 2);
}
std::size_t bytes_back(std::size_t rows) { return wire::kHeaderBytes + wire::kResultHeadBytes + rows * kWidth * 2; }

// Looks for a while without sleeping, as a backbone and a worker do.
void await(const net::Stream& stream, TimePoint spin_until, const net::FrameWriter& writer) {
  if (stream.buffered_input()) return;
  pollfd entry{.fd = stream.fd(), .events = stream.wants(), .revents = 0};
  if (!writer.idle(stream)) entry.events |= POLLOUT;
  if (monotonic_now() < spin_until) {
    if (::poll(&entry, 1, 0) == 0) std::this_thread::yield();
    return;
  }
  ::poll(&entry, 1, 100);
}

// Fills `into`; false when the peer is gone.
bool receive(net::Stream& stream, std::span<std::byte> into, net::FrameWriter& writer) {
  TimePoint spin_until = monotonic_now() + kSpin;
  for (std::size_t have = 0; have < into.size();) {
    const auto got = stream.read_some(into.subspan(have));
    if (!got || got->state == net::IoState::kEnd) return false;
    if (got->state == net::IoState::kDone) {
      have += got->bytes;
      continue;
    }
    if (!writer.flush(stream)) return false;
    await(stream, spin_until, writer);
  }
  return true;
}

class Pair {
 public:
  Pair(std::unique_ptr<net::Stream> near_end, std::unique_ptr<net::Stream> far_end)
      : near_(std::move(near_end)), far_(std::move(far_end)) {
    server_ = std::thread([this] { serve(); });
  }
  ~Pair() {
    near_.reset();
    server_.join();
  }

  // Rounds of so many rows: the first four bytes of each tell the far end.
  Nanos round(std::uint32_t rows) {
    std::vector<std::byte>& out = out_;
    out.resize(bytes_out(rows));
    store_le(out.data(), rows);
    in_.resize(bytes_back(rows));
    const TimePoint start = monotonic_now();
    KVASIR_CHECK(writer_.send(*near_, out).has_value());
    KVASIR_CHECK(receive(*near_, in_, writer_));
    return monotonic_now() - start;
  }

 private:
  void serve() {
    net::FrameWriter writer;
    std::vector<std::byte> in, back;
    while (true) {
      in.resize(sizeof(std::uint32_t));
      if (!receive(*far_, in, writer)) return;
      const auto rows = load_le<std::uint32_t>(in.data());
      in.resize(bytes_out(rows) - sizeof rows);
      if (!receive(*far_, in, writer)) return;
      back.resize(bytes_back(rows));
      if (!writer.send(*far_, back)) return;
    }
  }

  std::unique_ptr<net::Stream> near_, far_;
  net::FrameWriter writer_;
  std::vector<std::byte> out_, in_;
  std::thread server_;
};

struct Ends {
  std::unique_ptr<net::Stream> near_end, far_end;
};

Ends direct_ends() {
  const net::Listener listener = net::listen_on({"127.0.0.1", 0}).value();
  net::Fd client = net::connect_to({"127.0.0.1", listener.port}, kPatience).value();
  while (true)
    if (auto accepted = net::accept_from(listener).value())
      return {net::make_plain_stream(std::move(client)), net::make_plain_stream(std::move(accepted->fd))};
}

std::unique_ptr<net::WebSocketStream> dial(const Server& server, const std::string& token, bool wait_open) {
  const std::string url = std::format("http://127.0.0.1:{}", server.port());
  const auto dialer = net::RelayDialer::create({.url = url, .token = token, .ca_file = {}}).value();
  auto stream = dialer.open(net::connect_to(dialer.dial_address(), kPatience).value(), "bench", net::RelayDialer::Payload::kCiphertext).value();
  while (wait_open && !stream->is_open().value()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return stream;
}

std::unique_ptr<Pair> make_pair(Ends ends, const net::TlsIdentity& identity, const net::TlsContext& client,
                                const net::TlsContext& server) {
  return std::make_unique<Pair>(net::make_tls_client_stream(std::move(ends.near_end), client, identity.fingerprint).value(),
                                net::make_tls_server_stream(std::move(ends.far_end), server).value());
}

struct Figure {
  double p50_us = 0, rows_per_s = 0;
};

Figure measure(Pair& pair, std::uint32_t rows, Nanos gap, int rounds) {
  std::vector<Nanos> times;
  const TimePoint start = monotonic_now();
  for (int i = 0; i < rounds; ++i) {
    if (gap > Nanos::zero()) std::this_thread::sleep_for(gap);
    times.push_back(pair.round(rows));
  }
  const double took_s = std::chrono::duration<double>(monotonic_now() - start).count();
  std::ranges::nth_element(times, times.begin() + rounds / 2);
  return {std::chrono::duration<double, std::micro>(times[static_cast<std::size_t>(rounds / 2)]).count(), rows * rounds / took_s};
}

int run() {
  char folder[] = "/tmp/kvasir-relay-bench-XXXXXX";
  KVASIR_CHECK(::mkdtemp(folder) != nullptr);
  const std::filesystem::path top = folder;
  std::filesystem::create_directories(top / "models");
  std::filesystem::create_directories(top / "data");
  const auto log = [](const std::string&) {};
  HubOptions hub_options;
  hub_options.data_dir = top / "data";
  hub_options.models_dir = top / "models";
  auto hub = Hub::create(hub_options, make_memory_store(), log).value();
  ServerOptions server_options;
  server_options.listen = {"127.0.0.1", 0};
  auto server = Server::start(server_options, hub->router(), hub->authenticator(), hub->relay_host(), log).value();
  const auto token = [&](Scope scope) {
    const NewToken made = make_token(scope, "", std::nullopt, unix_now());
    KVASIR_CHECK(hub->store().put_token(made.record).has_value());
    return made.text;
  };
  const std::string worker_token = token(Scope::kWorker), backbone_token = token(Scope::kBackbone);

  const net::TlsIdentity identity = net::make_tls_identity().value();
  const net::TlsContext client = net::TlsContext::client().value(), tls = net::TlsContext::server(identity).value();
  auto far_end = dial(*server, worker_token, true);
  auto near_end = dial(*server, backbone_token, true);
  auto relayed = make_pair({std::move(near_end), std::move(far_end)}, identity, client, tls);
  auto direct = make_pair(direct_ends(), identity, client, tls);
  for (Pair* pair : {direct.get(), relayed.get()}) measure(*pair, 1, Nanos::zero(), 200);  // handshakes, caches

  struct Case {
    const char* name;
    std::uint32_t rows;
    Nanos gap;
    int rounds;
  };
  for (const Case& c : {Case{"1 row, back to back", 1, Nanos::zero(), 2000},
                        Case{"1 row, every 5 ms", 1, std::chrono::milliseconds(5), 200},
                        Case{"64 rows, back to back", 64, Nanos::zero(), 200}}) {
    std::vector<Figure> by_way[2];
    for (int repeat = 0; repeat < 5; ++repeat) {  // in turns, so that both see the same machine
      by_way[0].push_back(measure(*direct, c.rows, c.gap, c.rounds));
      by_way[1].push_back(measure(*relayed, c.rows, c.gap, c.rounds));
    }
    Figure best[2];
    for (int way = 0; way < 2; ++way) {
      std::ranges::sort(by_way[way], {}, &Figure::p50_us);
      best[way] = by_way[way][by_way[way].size() / 2];
      std::printf(R"({"case":"%s","way":"%s","p50_us":%.1f,"rows_per_s":%.0f})" "\n", c.name, way == 0 ? "direct" : "relay",
                  best[way].p50_us, best[way].rows_per_s);
    }
    std::printf("%s: the relay adds %.1f us to the p50, and passes %.2fx the rows a second\n", c.name,
                best[1].p50_us - best[0].p50_us, best[1].rows_per_s / best[0].rows_per_s);
    std::fflush(stdout);
  }
  relayed.reset();
  server->stop(Nanos::zero());
  server.reset();
  hub.reset();
  std::filesystem::remove_all(top);
  return 0;
}

}  // namespace
}  // namespace kvasir::hub

int main() { return kvasir::hub::run(); }
