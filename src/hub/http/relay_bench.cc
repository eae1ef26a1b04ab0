// relay_bench: a layer round through the relay against the same bytes on a direct connection.
//
// Loopback, n_embd 3072, f16 rows, 8 experts a row, weighted sums back; the far end answers at
// once without computing. Both ends speak TLS to each other in both cases, as they always do.
// In one run, alternating: one row back to back and after 5 ms of idleness, and 64-row batches, of
// which one, two or four are under way. One JSON object a line, then the comparison.
//   relay_bench [TEXT IN A CASE'S NAME [REPEATS]]
#include <poll.h>
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <format>
#include <memory>
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

Nanos cpu_time(clockid_t clock) {
  timespec time{};
  KVASIR_CHECK(::clock_gettime(clock, &time) == 0);
  return std::chrono::seconds(time.tv_sec) + Nanos(time.tv_nsec);
}

class Pair {
 public:
  Pair(std::unique_ptr<net::Stream> near_end, std::unique_ptr<net::Stream> far_end)
      : near_(std::move(near_end)), far_(std::move(far_end)) {
    server_ = std::thread([this] { serve(); });
    KVASIR_CHECK(::pthread_getcpuclockid(server_.native_handle(), &far_clock_) == 0);
  }
  ~Pair() {
    near_.reset();
    server_.join();
  }

  // So many rounds of so many rows, `depth` of them under way at once; what each took, from its
  // first byte to its last. The first four bytes of a request tell the far end.
  std::vector<Nanos> rounds(std::uint32_t rows, int depth, int count) {
    auto out = std::make_shared<std::vector<std::byte>>(bytes_out(rows));
    store_le(out->data(), rows);
    in_.resize(bytes_back(rows));
    std::vector<Nanos> took;
    std::deque<TimePoint> begun;
    std::size_t have = 0;
    TimePoint spin_until = monotonic_now() + kSpin;
    for (int asked = 0; static_cast<int>(took.size()) < count;) {
      while (asked < count && asked - static_cast<int>(took.size()) < depth && writer_.idle(*near_)) {
        begun.push_back(monotonic_now());
        KVASIR_CHECK(writer_.send_shared(*near_, {}, *out, out).has_value());
        ++asked;
      }
      const auto got = near_->read_some(std::span(in_).subspan(have));
      KVASIR_CHECK(got.has_value() && got->state != net::IoState::kEnd);
      if (got->state == net::IoState::kDone) {
        if ((have += got->bytes) < in_.size()) continue;
        took.push_back(monotonic_now() - begun.front());
        begun.pop_front();
        have = 0;
        spin_until = monotonic_now() + kSpin;
        continue;
      }
      KVASIR_CHECK(writer_.flush(*near_).has_value());
      await(*near_, spin_until, writer_);
    }
    return took;
  }

  Nanos far_cpu() const { return cpu_time(far_clock_); }

 private:
  void serve() {
    net::FrameWriter writer;
    std::vector<std::byte> in;
    while (true) {
      in.resize(sizeof(std::uint32_t));
      if (!receive(*far_, in, writer)) return;
      const auto rows = load_le<std::uint32_t>(in.data());
      in.resize(bytes_out(rows) - sizeof rows);
      if (!receive(*far_, in, writer)) return;
      if (back_ == nullptr || back_->size() != bytes_back(rows))
        back_ = std::make_shared<std::vector<std::byte>>(bytes_back(rows));
      if (!writer.send_shared(*far_, {}, *back_, back_)) return;
    }
  }

  std::unique_ptr<net::Stream> near_, far_;
  net::FrameWriter writer_;
  std::vector<std::byte> in_;
  std::shared_ptr<std::vector<std::byte>> back_;
  std::thread server_;
  clockid_t far_clock_{};
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
  net::Fd fd = net::connect_to(dialer.dial_address(), kPatience).value();
  auto stream = dialer.open(std::move(fd), "bench", net::RelayDialer::Payload::kCiphertext).value();
  while (wait_open && !stream->is_open().value()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return stream;
}

std::unique_ptr<Pair> make_pair(Ends ends, const net::TlsIdentity& identity, const net::TlsContext& client,
                                const net::TlsContext& server) {
  auto near_end = net::make_tls_client_stream(std::move(ends.near_end), client, identity.fingerprint).value();
  return std::make_unique<Pair>(std::move(near_end),
                                net::make_tls_server_stream(std::move(ends.far_end), server).value());
}

struct Figure {
  double p50_us = 0, rows_per_s = 0;
  // Processor time of a round, of whoever asks, of the far end and of everything else: the relay.
  double near_us = 0, far_us = 0, relay_us = 0;
};

struct Case {
  const char* name;
  std::uint32_t rows;
  int depth;
  Nanos gap;
  int rounds;
};

Figure measure(Pair& pair, const Case& c) {
  std::vector<Nanos> times;
  const TimePoint start = monotonic_now();
  const Nanos near_began = cpu_time(CLOCK_THREAD_CPUTIME_ID), far_began = pair.far_cpu();
  const Nanos all_began = cpu_time(CLOCK_PROCESS_CPUTIME_ID);
  if (c.gap == Nanos::zero()) {
    times = pair.rounds(c.rows, c.depth, c.rounds);
  } else {
    for (int i = 0; i < c.rounds; ++i) {
      std::this_thread::sleep_for(c.gap);
      times.push_back(pair.rounds(c.rows, 1, 1).front());
    }
  }
  const double took_s = std::chrono::duration<double>(monotonic_now() - start).count();
  const auto each_us = [&](Nanos whole) { return std::chrono::duration<double, std::micro>(whole).count() / c.rounds; };
  const Nanos near = cpu_time(CLOCK_THREAD_CPUTIME_ID) - near_began, far = pair.far_cpu() - far_began;
  const Nanos all = cpu_time(CLOCK_PROCESS_CPUTIME_ID) - all_began;
  std::ranges::nth_element(times, times.begin() + c.rounds / 2);
  return {.p50_us = std::chrono::duration<double, std::micro>(times[static_cast<std::size_t>(c.rounds / 2)]).count(),
          .rows_per_s = c.rows * c.rounds / took_s,
          .near_us = each_us(near),
          .far_us = each_us(far),
          .relay_us = each_us(all - near - far)};
}

// `only`: the cases whose names hold it.
int run(std::string_view only, int repeats) {
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
  for (Pair* pair : {direct.get(), relayed.get()}) pair->rounds(1, 1, 200);  // handshakes, caches

  using std::chrono::milliseconds;
  for (const Case& c : {Case{"1 row, back to back", 1, 1, Nanos::zero(), 2000},
                        Case{"1 row, every 5 ms", 1, 1, milliseconds(5), 200},
                        Case{"64 rows, one at a time", 64, 1, Nanos::zero(), 300},
                        Case{"64 rows, two under way", 64, 2, Nanos::zero(), 300},
                        Case{"64 rows, four under way", 64, 4, Nanos::zero(), 300}}) {
    if (!std::string_view(c.name).contains(only)) continue;
    std::vector<Figure> by_way[2];
    for (int repeat = 0; repeat < repeats; ++repeat) {  // in turns, so that both see the same machine
      by_way[0].push_back(measure(*direct, c));
      by_way[1].push_back(measure(*relayed, c));
    }
    Figure median[2];
    for (int way = 0; way < 2; ++way) {
      std::ranges::sort(by_way[way], {}, &Figure::rows_per_s);
      const Figure& m = median[way] = by_way[way][by_way[way].size() / 2];
      std::printf(
          R"({"case":"%s","way":"%s","p50_us":%.1f,"rows_per_s":%.0f,"near_us":%.1f,"far_us":%.1f,"relay_us":%.1f})"
          "\n", c.name, way == 0 ? "direct" : "relay", m.p50_us, m.rows_per_s, m.near_us, m.far_us, m.relay_us);
    }
    std::printf("%s: the relay adds %.1f us to the p50, and passes %.2fx the rows a second\n", c.name,
                median[1].p50_us - median[0].p50_us, median[1].rows_per_s / median[0].rows_per_s);
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

int main(int argc, char** argv) {
  return kvasir::hub::run(argc > 1 ? argv[1] : "", argc > 2 ? std::atoi(argv[2]) : 7);
}
