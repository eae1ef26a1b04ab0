// For tests: two connected streams in one process, plain or TLS, over a socket pair.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "net/stream.h"
#include "net/tls.h"

namespace kvasir::net {

enum class Kind { kPlain, kTls };

inline std::string kind_name(const testing::TestParamInfo<Kind>& info) {
  return info.param == Kind::kTls ? "Tls" : "Plain";
}

inline std::pair<Fd, Fd> socket_pair(int buffer_bytes = 0) {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0) std::abort();
  if (buffer_bytes > 0)
    for (int fd : fds) ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes);
  return {Fd(fds[0]), Fd(fds[1])};
}

inline const TlsIdentity& test_identity() {
  static const TlsIdentity identity = *make_tls_identity();
  return identity;
}

struct StreamPair {
  std::unique_ptr<Stream> client;
  std::unique_ptr<Stream> server;
};

inline StreamPair stream_pair(Kind kind, int buffer_bytes = 0) {
  auto [a, b] = socket_pair(buffer_bytes);
  if (kind == Kind::kPlain) return {make_plain_stream(std::move(a)), make_plain_stream(std::move(b))};
  static const TlsContext client_context = *TlsContext::client();
  static const TlsContext server_context = *TlsContext::server(test_identity());
  StreamPair pair{*make_tls_client_stream(std::move(a), client_context, test_identity().fingerprint),
                  *make_tls_server_stream(std::move(b), server_context)};
  // The handshake runs inside reads and writes.
  std::byte scratch[1];
  for (int i = 0; i < 8; ++i) {
    EXPECT_TRUE(pair.client->read_some(scratch));
    EXPECT_TRUE(pair.server->read_some(scratch));
  }
  return pair;
}

inline Bytes pattern(std::size_t size, unsigned seed = 1) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>((i * 131 + (i >> 8) * 17 + seed) & 0xff);
  return bytes;
}

}  // namespace kvasir::net
