// The hub's relay against clients that do what they like: requests to upgrade, frames and parts of frames,
// closes, hang-ups, in any order, by workers and backbones of several sessions and tokens. What comes out at
// one end went in at another of the same session, the limits hold, and nothing is left at the end.

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <boost/beast/http.hpp>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>

#include "base/check.h"
#include "hub/relay/relay.h"
#include "net/fd.h"

namespace {

using namespace kvasir;
using namespace kvasir::hub;
namespace http = boost::beast::http;

constexpr std::size_t kClientsMax = 24;
const RelayOptions kOptions{.waiting_max = 5,
                            .waiting_per_session_max = 2,
                            .waiting_per_token_max = 3,
                            .pairs_max = 4,
                            .pairs_per_session_max = 3,
                            .pairs_per_token_max = 3,
                            .askers_max = 3,
                            .answer_wait = std::chrono::hours(1),
                            .report_interval = std::chrono::hours(1)};

// Names belong to the token that used them first, as at a hub.
class Host final : public RelayHost {
 public:
  Result<bool> may_serve(const std::string& session, const std::string& token) override {
    return owners_.emplace(session, token).first->second == token;
  }
  bool is_banned(const std::string& session) override { return session == "banned"; }
  Status record(const std::vector<RelayUse>&) override { return {}; }

 private:
  std::map<std::string, std::string> owners_;
};

class Input {
 public:
  explicit Input(std::string_view bytes) : bytes_(bytes) {}
  bool empty() const { return bytes_.empty(); }
  std::uint8_t byte() {
    if (bytes_.empty()) return 0;
    const char out = bytes_.front();
    bytes_.remove_prefix(1);
    return static_cast<std::uint8_t>(out);
  }
  std::string_view piece(std::size_t n) {
    const std::string_view out = bytes_.substr(0, n);
    bytes_.remove_prefix(out.size());
    return out;
  }

 private:
  std::string_view bytes_;
};

// What a client has said in good frames; everyone's is another's.
char pattern(std::size_t id, std::size_t at) { return static_cast<char>((id * 131 + at * 31 + (at >> 8) * 17) & 0xff); }

struct Client {
  net::Fd fd;
  std::size_t id = 0;
  bool is_worker = false;
  std::string session;
  std::string unsent;
  std::size_t said = 0;  // bytes in good frames
  bool clean = true;     // nothing but good frames
  std::string inbox;     // bytes not understood yet
  bool upgraded = false;
  std::string heard;     // the payloads

  void frame(int opcode, bool fin, std::string_view payload) {
    constexpr unsigned char kMask[4] = {1, 2, 3, 4};
    unsent += static_cast<char>(opcode | (fin ? 0x80 : 0));
    if (payload.size() < 126) {
      unsent += static_cast<char>(0x80 | payload.size());
    } else {
      unsent += static_cast<char>(0xfe);
      unsent += static_cast<char>(payload.size() >> 8);
      unsent += static_cast<char>(payload.size() & 0xff);
    }
    unsent.append(reinterpret_cast<const char*>(kMask), 4);
    for (std::size_t i = 0; i < payload.size(); ++i) unsent += static_cast<char>(payload[i] ^ kMask[i % 4]);
  }
  void say(std::size_t n) {
    std::string payload;
    for (std::size_t i = 0; i < n; ++i) payload += pattern(id, said++);
    frame(2, true, payload);
  }
  void flush() {
    if (unsent.empty() || fd.get() < 0) return;
    const ssize_t n = ::send(fd.get(), unsent.data(), unsent.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0) unsent.erase(0, static_cast<std::size_t>(n));
  }
  bool listen() {
    bool some = false;
    char scratch[8192];
    for (ssize_t n; fd.get() >= 0 && (n = ::recv(fd.get(), scratch, sizeof scratch, MSG_DONTWAIT)) > 0; some = true)
      inbox.append(scratch, static_cast<std::size_t>(n));
    understand();
    return some;
  }

 private:
  // The hub's own frames are well-formed whatever it is told.
  void understand() {
    if (!upgraded) {
      const std::size_t end = inbox.find("\r\n\r\n");
      if (end == std::string::npos) return;
      upgraded = inbox.starts_with("HTTP/1.1 101 ");
      KVASIR_CHECK(upgraded || inbox.starts_with("HTTP/1.1 4"));
      inbox.erase(0, upgraded ? end + 4 : inbox.size());
    }
    while (upgraded && inbox.size() >= 2) {
      const auto at = [this](std::size_t i) { return std::size_t{static_cast<unsigned char>(inbox[i])}; };
      const std::size_t opcode = at(0) & 0x0f;
      KVASIR_CHECK((at(0) & 0x70) == 0 && (at(1) & 0x80) == 0);
      KVASIR_CHECK(opcode <= 2 || (opcode >= 8 && opcode <= 10));
      std::size_t head = 2, n = at(1);
      if (n >= 126) {
        const std::size_t more = n == 126 ? 2 : 8;
        if (inbox.size() < 2 + more) return;
        n = 0;
        for (std::size_t i = 0; i < more; ++i) n = n << 8 | at(2 + i);
        head += more;
      }
      if (inbox.size() < head + n) return;
      if (opcode <= 2) heard.append(inbox, head, n);
      inbox.erase(0, head + n);
    }
  }
};

class World {
 public:
  World() : relay_(Relay::create(kOptions, host_, io_.get_executor(), recorders(), [](const std::string&) {})) {}
  ~World() { relay_->forget_sockets(); }

  void step(Input& in) {
    const std::uint8_t op = in.byte(), arg = in.byte();
    Client* const client = clients_.empty() ? nullptr : &clients_[arg % clients_.size()];
    switch (op % 10) {
      case 0:
      case 1: dial(arg, {}); break;
      case 2: dial(arg, in.piece(in.byte())); break;  // with headers of its own
      case 3:
      case 4: if (client != nullptr) client->say(std::size_t{in.byte()} * in.byte() % 65'536); break;
      case 5:
        if (client == nullptr) break;
        client->unsent += in.piece(in.byte());
        client->clean = false;
        break;
      case 6: {
        if (client == nullptr) break;
        const std::uint8_t kind = in.byte(), last = in.byte(), size = in.byte();
        client->frame(kind % 16, last % 2 == 0, in.piece(size % 126));
        client->clean = false;
        break;
      }
      case 7: if (client != nullptr) client->listen(); break;
      case 8: if (client != nullptr && client->fd.get() >= 0) ::shutdown(client->fd.get(), SHUT_WR); break;
      default: if (client != nullptr) client->fd = net::Fd(); break;
    }
    for (Client& each : clients_) each.flush();
    turn();
    const RelayStats stats = relay_->stats();
    KVASIR_CHECK(stats.waiting <= kOptions.waiting_max && stats.pairs <= kOptions.pairs_max);
  }

  void finish() {
    for (bool moved = true; moved;) {
      moved = false;
      for (Client& client : clients_) {
        client.flush();
        moved |= client.listen();
      }
      turn();
    }
    for (const Client& client : clients_) check_heard(client);
    const bool nobody_asks = asking_ == 0;
    for (Client& client : clients_) client.fd = net::Fd();
    turn();
    KVASIR_CHECK(relay_->stats().waiting == 0 && relay_->stats().pairs == 0);
    if (!nobody_asks) return;  // the next worker would be theirs
    // Nothing of what was is counted any longer: as many pairs as ever fit.
    clients_.clear();
    for (std::uint8_t i = 0; i < kOptions.pairs_per_session_max; ++i) {
      dial(/*is_worker=*/true, "fresh", "token1", {});
      turn();
      dial(/*is_worker=*/false, "fresh", "token1", {});
      turn();
      KVASIR_CHECK(relay_->stats().pairs == i + std::size_t{1});
    }
    for (Client& client : clients_) client.fd = net::Fd();
    turn();
    KVASIR_CHECK(relay_->stats().waiting == 0 && relay_->stats().pairs == 0);
  }

 private:
  static asio::thread_pool& recorders() {
    static asio::thread_pool pool(1);
    return pool;
  }

  void turn() {
    io_.restart();
    while (io_.poll() > 0) io_.restart();
  }

  void dial(std::uint8_t how, std::string_view headers) {
    static const std::string kSessions[] = {"a", "b", "c", "banned"};
    dial(how % 2 == 0, kSessions[how / 2 % 4], how / 8 % 2 == 0 ? "token1" : "token2", headers);
  }

  void dial(bool is_worker, const std::string& session, const std::string& token, std::string_view headers) {
    if (clients_.size() >= kClientsMax) return;
    std::string head =
        "GET /api/expert-relay HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: ";
    head += headers.empty() ? "dGhlIHNhbXBsZSBub25jZQ==" : headers;
    head += "\r\n\r\n";
    http::request_parser<http::string_body> parser;
    parser.header_limit(8192);
    boost::system::error_code error;
    parser.put(asio::buffer(head), error);
    if (error || !parser.is_header_done() || !is_websocket_upgrade(parser.get())) return;

    int fds[2];
    KVASIR_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
    asio::ip::tcp::socket socket(io_);
    socket.assign(asio::ip::tcp::v4(), fds[0]);
    Client& client = clients_.emplace_back();
    client.fd = net::Fd(fds[1]);
    client.id = next_id_++;
    client.is_worker = is_worker;
    client.session = session;
    if (is_worker) {
      if (relay_->refuse_worker(session, token)) return;
      asio::co_spawn(io_, serve(make_end(std::move(socket)), parser.release(), session, token), asio::detached);
    } else {
      asio::co_spawn(io_, ask(make_end(std::move(socket)), parser.release(), session, token), asio::detached);
    }
  }

  asio::awaitable<void> serve(std::shared_ptr<End> end, End::Request request, std::string session, std::string token) {
    if (!co_await end->accept(request)) relay_->add_worker(end, session, token);
  }

  asio::awaitable<void> ask(std::shared_ptr<End> end, End::Request request, std::string session, std::string token) {
    RelayRefusal refusal;
    ++asking_;
    RelaySlotPtr worker = co_await relay_->take_worker(session, token, refusal);
    --asking_;
    if (worker == nullptr) {
      KVASIR_CHECK(refusal.status >= 400 && !refusal.sentence.empty());
      co_return;
    }
    if (co_await end->accept(request)) relay_->give_up(std::move(worker));
    else relay_->join(std::move(worker), end);
  }

  void check_heard(const Client& client) const {
    if (client.heard.empty()) return;
    const bool right = std::ranges::any_of(clients_, [&](const Client& other) {
      if (other.is_worker == client.is_worker || other.session != client.session) return false;
      if (!other.clean) return true;
      if (client.heard.size() > other.said) return false;
      for (std::size_t i = 0; i < client.heard.size(); ++i)
        if (client.heard[i] != pattern(other.id, i)) return false;
      return true;
    });
    KVASIR_CHECK(right);
  }

  asio::io_context io_{1};
  Host host_;
  std::shared_ptr<Relay> relay_;
  std::deque<Client> clients_;
  std::size_t next_id_ = 0, asking_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr int kStepsMax = 300;
  Input in({reinterpret_cast<const char*>(data), size});
  World world;
  for (int i = 0; i < kStepsMax && !in.empty(); ++i) world.step(in);
  world.finish();
  return 0;
}
