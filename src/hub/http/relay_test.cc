// The relay over real sockets, with the ends that workers and backbones use.

#include <gtest/gtest.h>

#include <thread>

#include "hub/http/test_hub.h"
#include "net/connect.h"
#include "net/websocket.h"

namespace kvasir::hub {
namespace {

using net::IoState;
using net::WebSocketStream;
using Socket = std::unique_ptr<WebSocketStream>;
using namespace std::chrono_literals;

constexpr Nanos kPatience = 20s;

// Turns the crank until `done`; false after kPatience.
template <typename Condition>
bool wait_for(const Condition& done) {
  for (const TimePoint end = monotonic_now() + kPatience; !done();) {
    if (monotonic_now() > end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

class RelayTest : public testing::Test {
 protected:
  static TestHub::Options options() {
    TestHub::Options out;
    out.server.relay.answer_wait = 2s;
    out.server.relay.waiting_per_session_max = 3;
    out.server.relay.pairs_per_session_max = 4;
    out.server.relay.report_interval = 100ms;
    return out;
  }

  RelayTest() : RelayTest(options()) {}
  explicit RelayTest(TestHub::Options options) : hub_(std::move(options)) {}

  using Payload = net::RelayDialer::Payload;

  Socket dial(const std::string& token, std::string_view session, Payload payload = Payload::kAnyBytes) {
    const std::string url = std::format("http://127.0.0.1:{}", hub_.server->port());
    const auto dialer = net::RelayDialer::create({.url = url, .token = token, .ca_file = {}});
    EXPECT_TRUE(dialer);
    return *dialer->open(*net::connect_to(dialer->dial_address(), kPatience), session, payload);
  }
  Socket worker(std::string_view session, Payload payload = Payload::kAnyBytes) {
    Socket out = dial(hub_.worker, session, payload);
    EXPECT_TRUE(wait_for([&] { return *out->is_open(); }));
    return out;
  }
  static std::string refusal(WebSocketStream& socket) {
    std::string out;
    EXPECT_TRUE(wait_for([&] {
      const auto open = socket.is_open();
      if (!open) out = open.error().message;
      return !open || *open;
    }));
    return out;
  }
  std::pair<Socket, Socket> pair(std::string_view session, Payload payload = Payload::kAnyBytes) {
    Socket w = worker(session, payload), b = dial(hub_.backbone, session, payload);
    EXPECT_TRUE(wait_for([&] { return *b->is_open(); }));
    return {std::move(w), std::move(b)};
  }

  static void send(WebSocketStream& from, ByteSpan bytes) {
    EXPECT_TRUE(wait_for([&] {
      const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
      const auto sent = from.write_some({&part, 1});
      EXPECT_TRUE(sent) << sent.error().message;
      if (!sent) return true;
      bytes = bytes.subspan(sent->bytes);
      return bytes.empty() && !from.buffered_output();
    }));
  }
  static Bytes receive(WebSocketStream& at, std::size_t n) {
    Bytes out(n);
    std::size_t have = 0;
    EXPECT_TRUE(wait_for([&] {
      const auto got = at.read_some(std::span(out).subspan(have));
      EXPECT_TRUE(got) << got.error().message;
      if (!got || got->state == IoState::kEnd) return true;
      have += got->bytes;
      return have == n;
    }));
    out.resize(have);
    return out;
  }
  // "" for an orderly end, else the error.
  static std::string ending(WebSocketStream& at) {
    std::string out = "still open";
    EXPECT_TRUE(wait_for([&] {
      std::byte scratch[256];
      const auto got = at.read_some(scratch);
      if (!got) out = got.error().message;
      else if (got->state == IoState::kEnd) out.clear();
      return !got || got->state == IoState::kEnd;
    }));
    return out;
  }
  static Bytes pattern(std::size_t n, unsigned seed) {
    Bytes out(n);
    for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<std::byte>((i * 131 + (i >> 8) * 17 + seed) & 0xff);
    return out;
  }

  TestHub hub_;
};

TEST_F(RelayTest, CarriesBytesBothWays) {
  for (const Payload payload : {Payload::kAnyBytes, Payload::kCiphertext}) {  // masked, and by the kernel's hand
    auto [w, b] = pair("laptop", payload);
    for (const std::size_t n : {std::size_t{1}, std::size_t{6'000}, std::size_t{65'536}, std::size_t{1'000'000}}) {
      const Bytes out = pattern(n, 1), back = pattern(n, 2);
      std::thread reader([&, &at = *w] { EXPECT_EQ(receive(at, n), out); });
      send(*b, out);
      reader.join();
      std::thread other([&, &at = *b] { EXPECT_EQ(receive(at, n), back); });
      send(*w, back);
      other.join();
    }
  }
}

// Frames as long as what their sender expects to write, which is a guess.
TEST_F(RelayTest, ALargeFrameIsCarriedAsItComes) {
  auto [w, b] = pair("laptop", Payload::kCiphertext);
  const Bytes bytes = pattern(1'000'000, 1);
  const ByteSpan all(bytes);
  b->expect_to_write(900'000);
  for (std::size_t at = 0; at < all.size(); at += 100'000) {
    send(*b, all.subspan(at, 100'000));
    const Bytes got = receive(*w, 100'000);
    ASSERT_TRUE(std::ranges::equal(got, all.subspan(at, 100'000))) << "at " << at;
  }
  w->expect_to_write(300'000);
  send(*w, all.first(1'000));
  EXPECT_TRUE(std::ranges::equal(receive(*b, 1'000), all.first(1'000)));
  send(*b, all.first(10));  // the other way is open meanwhile
  EXPECT_TRUE(std::ranges::equal(receive(*w, 10), all.first(10)));
}

// What is said of a message's rest is not taken for another message: its frame would never end.
TEST_F(RelayTest, AFrameEndsWithItsMessage) {
  auto [w, b] = pair("laptop", Payload::kCiphertext);
  for (const std::size_t left : {std::size_t{300'000}, std::size_t{200'000}, std::size_t{100'000}}) {
    b->expect_to_write(left);
    send(*b, pattern(100'000, 1));
    EXPECT_EQ(receive(*w, 100'000), pattern(100'000, 1));
  }
  send(*b, pattern(10, 1));  // a farewell, of which nobody spoke
  EXPECT_EQ(receive(*w, 10), pattern(10, 1));
  b->shutdown();
  EXPECT_EQ(ending(*w), "");
}

TEST_F(RelayTest, AFrameThatBreaksOffEndsTheOther) {
  for (const bool worker_breaks : {false, true}) {
    auto [w, b] = pair("laptop", Payload::kCiphertext);
    Socket& from = worker_breaks ? w : b;
    const Socket& to = worker_breaks ? b : w;
    send(*b, pattern(10, 1));  // the worker speaks second
    receive(*w, 10);
    from->expect_to_write(1'000'000);
    send(*from, pattern(100'000, 1));
    receive(*to, 100'000);
    from.reset();
    EXPECT_NE(ending(*to), "");
    EXPECT_TRUE(wait_for([&] { return hub_.server->stats().relay.pairs == 0; }));
  }
}

class ImpatientRelay : public RelayTest {
 protected:
  static TestHub::Options impatient() {
    TestHub::Options out = options();
    out.server.relay.stall = 200ms;
    out.server.relay.ping_waiting = 500ms;
    out.server.relay.silence_waiting = 6s;
    out.server.relay.idle = 8s;
    return out;
  }
  ImpatientRelay() : RelayTest(impatient()) {}
};

// Who waits for the rest of a frame does not stall.
TEST_F(ImpatientRelay, CutsNobodyForASlowSender) {
  auto [w, b] = pair("laptop", Payload::kCiphertext);
  b->expect_to_write(200'000);
  send(*b, pattern(100'000, 1));
  EXPECT_EQ(receive(*w, 100'000), pattern(100'000, 1));
  std::this_thread::sleep_for(3s);  // the watchman looks every second
  send(*b, pattern(100'000, 2));
  EXPECT_EQ(receive(*w, 100'000), pattern(100'000, 2));
}

// Waiting sockets are pinged; one that answers may wait for ever, and one that does not makes room.
TEST_F(ImpatientRelay, NoticesWhoAnswersNoMore) {
  Socket alive = worker("alive"), silent = worker("silent");
  const auto waiting = [&] { return hub_.server->stats().relay.waiting; };
  ASSERT_TRUE(wait_for([&] { return waiting() == 2; }));
  EXPECT_TRUE(wait_for([&] {
    EXPECT_TRUE(alive->has_input());  // the pongs are in it
    return waiting() == 1;
  }));
  EXPECT_FALSE(*alive->has_input());
  Socket b = dial(hub_.backbone, "alive");
  EXPECT_TRUE(wait_for([&] { return *b->is_open(); }));
  EXPECT_NE(ending(*silent), "");
}

TEST_F(ImpatientRelay, EndsAPairWithoutBytes) {
  auto [w, b] = pair("laptop");
  const std::string to_worker = ending(*w);
  EXPECT_NE(to_worker.find("no bytes for a long time"), std::string::npos) << to_worker;
  EXPECT_NE(ending(*b).find("no bytes for a long time"), std::string::npos);
}

TEST_F(RelayTest, SeveralConnectionsOfOneWorkerKeepApart) {
  std::vector<Socket> ws, bs;
  for (unsigned i = 0; i < 3; ++i) {
    auto [w, b] = pair("laptop");
    ws.push_back(std::move(w));
    bs.push_back(std::move(b));
  }
  auto [other_w, other_b] = pair("desktop");
  for (unsigned i = 0; i < 3; ++i) send(*bs[i], pattern(1000, i));
  send(*other_b, pattern(1000, 9));
  for (unsigned i = 0; i < 3; ++i) EXPECT_EQ(receive(*ws[i], 1000), pattern(1000, i));
  EXPECT_EQ(receive(*other_w, 1000), pattern(1000, 9));
}

TEST_F(RelayTest, ABackboneWaitsForTheNextSocket) {
  Socket b = dial(hub_.backbone, "laptop");
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(b->is_open());
    std::this_thread::sleep_for(2ms);
  }
  EXPECT_FALSE(*b->is_open());
  Socket w = worker("laptop");
  EXPECT_TRUE(wait_for([&] { return *b->is_open(); }));
  Socket nobody = dial(hub_.backbone, "nobody");
  EXPECT_NE(refusal(*nobody).find("no worker waits"), std::string::npos);
}

TEST_F(RelayTest, WhoEndsTellsTheOther) {
  {
    auto [w, b] = pair("laptop");
    send(*b, pattern(10, 1));
    EXPECT_EQ(receive(*w, 10), pattern(10, 1));
    b->shutdown();
    EXPECT_EQ(ending(*w), "");
  }
  {
    auto [w, b] = pair("laptop");
    w->shutdown();
    EXPECT_EQ(ending(*b), "");
  }
  {
    auto [w, b] = pair("laptop");
    send(*b, pattern(10, 1));
    w.reset();  // as if it had died
    EXPECT_NE(ending(*b).find("gone"), std::string::npos);
  }
  EXPECT_TRUE(wait_for([&] { return hub_.server->stats().relay.pairs == 0; }));
  // A socket that died while it waited is not given to anybody.
  Socket dying = worker("laptop");
  EXPECT_TRUE(wait_for([&] { return hub_.server->stats().relay.waiting == 1; }));
  dying.reset();
  EXPECT_TRUE(wait_for([&] { return hub_.server->stats().relay.waiting == 0; }));
}

TEST_F(RelayTest, AWorkerThatSpeaksFirstIsShownOut) {
  Socket w = worker("laptop");
  const Bytes bytes = pattern(10, 1);
  const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  // The relay's answer may be there before the call that sent the bytes returns.
  const auto sent = w->write_some({&part, 1});
  const std::string said = sent ? ending(*w) : sent.error().message;
  EXPECT_NE(said.find("nobody listens"), std::string::npos) << said;
}

TEST_F(RelayTest, Refusals) {
  const auto text = [&](const std::string& token, std::string_view session) {
    Socket socket = dial(token, session);
    return refusal(*socket);
  };
  EXPECT_NE(text("kvasir_wrong", "laptop").find("not known"), std::string::npos);
  EXPECT_EQ(text(hub_.worker, "laptop"), "");
  // Another node's token cannot take the name over.
  EXPECT_NE(text(hub_.token(Scope::kWorker), "laptop").find("belongs to another token"), std::string::npos);
  EXPECT_NE(text(hub_.worker, "a b").find("session"), std::string::npos);
  EXPECT_NE(text(hub_.worker, "").find("session"), std::string::npos);
  EXPECT_NE(text(hub_.worker, std::string(200, 'a')).find("session"), std::string::npos);
  EXPECT_NE(text(hub_.admin, "laptop").find("role"), std::string::npos);
  ASSERT_TRUE(hub_.hub->store().put_ban({"laptop", "", 1}));
  hub_.hub->read_bans();
  EXPECT_NE(text(hub_.worker, "laptop").find("banned"), std::string::npos);
  EXPECT_EQ(hub_.log_text().find(hub_.worker), std::string::npos);
  TestClient client = hub_.client();
  EXPECT_EQ(client.get("/api/expert-relay?session=laptop", hub_.worker).status, 426);
}

// It dials nowhere: a session that looks like an address of this machine, the hub's own port among them,
// is a name under which nobody waits.
TEST_F(RelayTest, ReachesNothingButSocketsThatCameToIt) {
  const std::string own_port = std::to_string(hub_.server->port());
  for (const std::string& session : {"127.0.0.1:" + own_port, "localhost:" + own_port, own_port, "hub:" + own_port}) {
    Socket b = dial(hub_.backbone, session);
    EXPECT_NE(refusal(*b).find("no worker waits"), std::string::npos) << session;
  }
  // Where somebody waits under such a name, it is that worker who is reached.
  Socket w = worker("127.0.0.1:" + own_port), b = dial(hub_.backbone, "127.0.0.1:" + own_port);
  EXPECT_TRUE(wait_for([&] { return *b->is_open(); }));
  send(*b, std::as_bytes(std::span("GET /api/admin/nodes HTTP/1.1\r\n\r\n")));
  EXPECT_EQ(receive(*w, 5).size(), 5u) << "what was sent went to the worker that waits";
}

// Older clients put the token into the address.
TEST_F(RelayTest, TheTokenInTheAddress) {
  TestClient client = hub_.client();
  const auto ask = [&](const std::string& token) {
    client.connect();
    client.send(std::format("GET /api/expert-relay?session=old&token={} HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\n"
                            "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
                            token));
    return client.receive().status;
  };
  EXPECT_EQ(ask(hub_.worker), 101);
  EXPECT_EQ(ask("kvasir_wrong"), 401);
  TestClient elsewhere = hub_.client();  // nowhere else
  EXPECT_EQ(elsewhere.get("/api/models?token=" + hub_.worker, "").status, 401);
  EXPECT_EQ(hub_.log_text().find(hub_.worker), std::string::npos);
}

TEST_F(RelayTest, Quotas) {
  // The newest sockets of a session wait; an older one makes room. An end sees its 101 before the
  // relay has the socket, and only what the relay has is older than the next.
  std::vector<Socket> waiting;
  for (std::size_t i = 1; i <= 3; ++i) {
    waiting.push_back(worker("laptop"));
    ASSERT_TRUE(wait_for([&] { return hub_.server->stats().relay.waiting == i; }));
  }
  waiting.push_back(worker("laptop"));
  EXPECT_NE(ending(*waiting[0]).find("newer"), std::string::npos);
  waiting.clear();
  EXPECT_TRUE(wait_for([&] { return hub_.server->stats().relay.waiting == 0; }));
  std::vector<std::pair<Socket, Socket>> pairs;
  for (int i = 0; i < 4; ++i) pairs.push_back(pair("laptop"));
  Socket one_more = dial(hub_.backbone, "laptop");
  EXPECT_NE(refusal(*one_more).find("as many connections as it takes"), std::string::npos);
  pairs.pop_back();
  EXPECT_TRUE(wait_for([&] { return hub_.server->stats().relay.pairs == 3; }));
  pairs.push_back(pair("laptop"));
}

// Whoever has two tokens can make pairs and drop them all day.
TEST_F(RelayTest, LinesAboutLostPairsAreLimited) {
  const TimePoint begun = monotonic_now();
  std::size_t dropped = 0;
  for (; dropped < 2 * kLogLinesAtOnce; ++dropped) {
    auto [w, b] = pair("laptop");
    w.reset();  // as if it had died
    EXPECT_NE(ending(*b).find("gone"), std::string::npos);
  }
  const auto seconds = static_cast<std::ptrdiff_t>((monotonic_now() - begun) / kLogLineEvery);
  const std::string log = hub_.log_text();
  const std::ptrdiff_t n = std::ranges::count(log, '\n');
  EXPECT_GE(n, std::ptrdiff_t{kLogLinesAtOnce});
  EXPECT_LE(n, std::ptrdiff_t{kLogLinesAtOnce} + seconds + 8) << "one a second, and those about the model";
}

// A peer that does not read fills its own pair's buffers and nothing else.
TEST_F(RelayTest, OneSlowPeerSlowsNobody) {
  auto [slow_w, slow_b] = pair("slow");
  auto [w, b] = pair("quick");
  const Bytes bytes = pattern(64 << 10, 3);
  std::size_t taken = 0;
  for (int idle = 0; idle < 200;) {  // until nothing more is taken
    const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
    const auto sent = slow_b->write_some({&part, 1});
    ASSERT_TRUE(sent);
    taken += sent->bytes;
    if (sent->bytes > 0) idle = 0;
    else ++idle, std::this_thread::sleep_for(1ms);
  }
  EXPECT_LT(taken, 64u << 20);  // what the sockets' own buffers hold
  for (unsigned i = 0; i < 100; ++i) {
    send(*b, pattern(5000, i));
    ASSERT_EQ(receive(*w, 5000), pattern(5000, i));
  }
  // And what was taken is not lost.
  std::size_t got = 0;
  Bytes into(1 << 20);
  EXPECT_TRUE(wait_for([&] {
    const auto read = slow_w->read_some(into);
    EXPECT_TRUE(read);
    if (!read) return true;
    got += read->bytes;
    if (slow_b->buffered_output()) (void)slow_b->write_some({});
    return got >= taken;
  }));
  EXPECT_EQ(got, taken);
}

TEST_F(RelayTest, MetersBothDirectionsIntoTheLedger) {
  auto [w, b] = pair("laptop");
  send(*b, pattern(1000, 1));
  EXPECT_EQ(receive(*w, 1000).size(), 1000u);
  send(*w, pattern(3000, 1));
  EXPECT_EQ(receive(*b, 3000).size(), 3000u);
  const auto ledger = [&] {
    std::map<Side, std::int64_t> out;
    const std::int64_t day = unix_now() / 86'400;
    for (const Contribution& c : *hub_.hub->store().contributions(day - 1, day)) {
      EXPECT_EQ(c.worker_id, "laptop");
      out[c.side] += c.bytes;
    }
    return out;
  };
  // While the pair lives, too.
  EXPECT_TRUE(wait_for([&] { return ledger()[Side::kRelayToBackbone] == 3000; }));
  EXPECT_EQ(ledger()[Side::kRelayToWorker], 1000);
  send(*b, pattern(500, 1));
  EXPECT_EQ(receive(*w, 500).size(), 500u);
  hub_.server->stop(Nanos::zero());  // what is not recorded yet is recorded at the end
  EXPECT_EQ(ledger()[Side::kRelayToWorker], 1500);
  EXPECT_EQ(ledger()[Side::kRelayToBackbone], 3000);
}

TEST_F(RelayTest, StopsInWords) {
  Socket waiting = worker("a");
  auto [w, b] = pair("b");
  EXPECT_TRUE(wait_for([&] {
    const auto relay = hub_.server->stats().relay;
    return relay.waiting == 1 && relay.pairs == 1;
  }));
  std::thread stopping([&] { hub_.server->stop(Nanos::zero()); });
  EXPECT_NE(ending(*waiting).find("dial again"), std::string::npos);
  EXPECT_NE(ending(*w).find("dial again"), std::string::npos);
  EXPECT_NE(ending(*b).find("dial again"), std::string::npos);
  stopping.join();
}

}  // namespace
}  // namespace kvasir::hub
