// HTTP/1.1 with keep-alive over TCP or TLS, everything bounded: connections (in all and of one
// address), header and body bytes, requests a second of one address and one token, the time
// a client may idle, dawdle or stall, downloads at once, and jobs that wait for a thread.
//
// A few threads drive the sockets; handlers and file reads run on others. When there are too
// many connections the one that has idled for longest makes room.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/error.h"
#include "hub/auth/tokens.h"
#include "hub/core/rate_limiter.h"
#include "hub/http/router.h"
#include "hub/relay/relay_host.h"
#include "net/connect.h"

namespace kvasir::hub {

struct ServerOptions {
  net::HostPort listen;
  // PEM files; without them plain HTTP, and then on a loopback address only.
  std::string certificate_file;
  std::string key_file;
  // Believe X-Forwarded-For of connections from loopback: a proxy there sets it.
  bool trust_proxy = false;

  std::size_t connections_max = 4096;
  std::size_t connections_per_address_max = 1024;
  std::size_t downloads_max = 512;
  std::size_t jobs_max = 1024;
  std::size_t header_bytes_max = 8192;
  Nanos handshake_timeout = std::chrono::seconds(10);
  Nanos idle_timeout = std::chrono::seconds(75);
  Nanos header_timeout = std::chrono::seconds(10);
  Nanos body_timeout = std::chrono::seconds(30);
  Nanos stall_timeout = std::chrono::seconds(60);  // a download that takes no byte for so long
  Nanos wait_max = std::chrono::seconds(30);       // of a long poll
  Rate per_address{200, 400};
  Rate per_token{200, 400};
  RelayOptions relay;
};

struct ServerStats {
  std::size_t connections = 0;
  std::size_t downloads = 0;
  std::uint64_t requests = 0;
  std::uint64_t bytes_sent = 0;  // of bodies made from files
  RelayStats relay;
};

class Server {
 public:
  // `router`, `authenticator`, `relay_host` and what `log` refers to must outlive the server. No
  // line given to `log` holds a token.
  static Result<std::unique_ptr<Server>> start(ServerOptions options, const Router& router,
                                               Authenticator& authenticator, RelayHost& relay_host,
                                               std::function<void(const std::string&)> log);
  virtual ~Server() = default;  // stops at once

  virtual std::uint16_t port() const = 0;
  virtual ServerStats stats() const = 0;
  // Takes no more connections, lets requests under way finish within `patience`, then closes.
  virtual void stop(Nanos patience) = 0;
};

}  // namespace kvasir::hub
