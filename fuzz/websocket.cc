// A relay, or a proxy before it, that answers a node's dial with whatever it likes: the HTTP answers, TLS,
// and the frames of the WebSocket.

#include <openssl/evp.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "base/check.h"
#include "net/websocket.h"

namespace {

using namespace kvasir;
using namespace kvasir::net;

RelayDialer dialer(const char* url) {
  ::setenv("https_proxy", "http://user:secret@127.0.0.1:1", 1);
  auto made = RelayDialer::create({.url = url, .token = "kvasir_fuzz_token", .ca_file = {}});
  KVASIR_CHECK(made.has_value());
  return *std::move(made);
}

// What RFC 6455 wants in answer to the key of a request.
std::string accept_key(std::string_view request) {
  constexpr std::string_view kHeader = "Sec-WebSocket-Key: ";
  const std::size_t at = request.find(kHeader);
  KVASIR_CHECK(at != std::string_view::npos);
  std::string text(request.substr(at + kHeader.size(), 24));
  text += "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
  unsigned char digest[EVP_MAX_MD_SIZE], out[64];
  unsigned n = 0;
  KVASIR_CHECK(EVP_Digest(text.data(), text.size(), digest, &n, EVP_sha1(), nullptr) == 1);
  return {reinterpret_cast<char*>(out), static_cast<std::size_t>(EVP_EncodeBlock(out, digest, static_cast<int>(n)))};
}

// The hostile end.
class Peer {
 public:
  explicit Peer(Fd fd) : fd_(std::move(fd)) {}
  std::string take() {
    std::string out;
    char scratch[4096];
    for (ssize_t n; (n = ::recv(fd_.get(), scratch, sizeof scratch, MSG_DONTWAIT)) > 0;)
      out.append(scratch, static_cast<std::size_t>(n));
    return out;
  }
  std::size_t send(std::string_view bytes) {
    const ssize_t n = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    return n > 0 ? static_cast<std::size_t>(n) : 0;
  }
  void hang_up() { fd_ = Fd(); }

 private:
  Fd fd_;
};

// Whole binary messages with one byte of the input each as their length (times 100), so that what must
// arrive is known.
std::string good_frames(std::string_view lengths, std::string& payload) {
  std::string out;
  for (const unsigned char c : lengths) {
    const std::size_t n = std::size_t{c} * 100;
    out += '\x82';
    if (n < 126) {
      out += static_cast<char>(n);
    } else {
      out += '\x7e';
      out += static_cast<char>(n >> 8);
      out += static_cast<char>(n & 0xff);
    }
    for (std::size_t i = 0; i < n; ++i) {
      const char byte = static_cast<char>((payload.size() * 31 + (payload.size() >> 8)) & 0xff);
      out += byte;
      payload += byte;
    }
  }
  return out;
}

}  // namespace

// First byte: 1: through the proxy, to TLS; 2: the handshake is answered as it must be; 4: and the rest are
// the lengths of good messages; the second: the sizes of pieces.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const RelayDialer plain = dialer("http://127.0.0.1:1"), proxied = dialer("https://relay.example:443");
  if (size < 2) return 0;
  const bool through_proxy = data[0] & 1, answered = !through_proxy && (data[0] & 2), good = answered && (data[0] & 4);
  std::string_view input(reinterpret_cast<const char*>(data) + 2, size - 2);
  if (good) input = input.substr(0, 40);

  int fds[2];
  KVASIR_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
  Peer peer{Fd(fds[1])};
  const auto opened = (through_proxy ? proxied : plain).open(Fd(fds[0]), "laptop-1a2b");
  KVASIR_CHECK(opened.has_value());
  WebSocketStream& stream = **opened;
  (void)stream.is_open();
  const std::string request = peer.take();
  KVASIR_CHECK(request.starts_with(through_proxy ? "CONNECT relay.example:443 " : "GET /api/expert-relay?session=laptop-1a2b "));
  KVASIR_CHECK(through_proxy != request.contains("kvasir_fuzz_token"));  // the proxy never sees it

  std::string payload, bytes;
  if (answered)
    bytes = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: " +
            accept_key(request) + "\r\n\r\n";
  bytes += good ? good_frames(input, payload) : std::string(input);

  constexpr std::size_t kStepsMax = 300;
  const std::size_t step = std::max(1 + std::size_t{data[1]} * data[1], bytes.size() / kStepsMax);
  constexpr std::size_t kReadsMax = 3000;  // of megabytes byte by byte there would be too many for a fuzzer
  char into[3000];
  const std::size_t room = std::min(sizeof into, std::max(1 + data[1] % sizeof into, bytes.size() / kReadsMax));
  std::string got;
  std::string_view unsent = bytes;
  bool failed = false;
  for (bool hung_up = false;;) {
    const std::size_t sent = peer.send(unsent.substr(0, step));
    unsent.remove_prefix(sent);
    if (const auto open = stream.is_open(); !open) failed = true;
    bool moved = false;
    for (;;) {
      const auto read = stream.read_some(std::as_writable_bytes(std::span(into)).first(room));
      if (!read) KVASIR_CHECK(!read.error().message.empty());
      if (failed) KVASIR_CHECK(!read || read->state != IoState::kWouldBlock);  // an error is final
      failed |= !read;
      if (!read || read->state != IoState::kDone) break;
      KVASIR_CHECK(read->bytes > 0 && read->bytes <= room);
      got.append(into, read->bytes);
      moved = true;
    }
    KVASIR_CHECK(got.size() <= bytes.size());
    std::string word = "word";
    const iovec part{word.data(), word.size()};
    (void)stream.write_some({&part, 1});
    peer.take();
    if (moved || (sent > 0 && !unsent.empty())) continue;  // else nobody reads the rest
    if (hung_up) break;
    peer.hang_up();
    hung_up = true;
  }
  if (good) KVASIR_CHECK(got == payload);
  stream.shutdown();
  return 0;
}
