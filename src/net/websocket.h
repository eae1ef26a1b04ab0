// A stream of bytes inside the WebSocket of a relay, for the end that dials: a worker that
// waits for a backbone, or a backbone that asks for a worker. Behind the seam of net/stream.h:
// non-blocking and pollable, from the proxy's CONNECT and the certificate check on.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "net/relay_url.h"
#include "net/stream.h"

namespace kvasir::net {

class WebSocketStream : public Stream {
 public:
  // Both move what is under way on, and fail as reading does.
  // The relay has agreed: a worker's socket waits, a backbone's is joined to its worker.
  virtual Result<bool> is_open() = 0;
  // Bytes from the other end are there: nobody sends them before the two are joined.
  virtual Result<bool> has_input() = 0;
  // After an error: the worker waits at another hub, at this address; or empty.
  virtual const std::string& moved_to() const = 0;

 protected:
  using Stream::Stream;
};

struct RelayOptions {
  std::string url;      // see parse_relay_url
  std::string token;    // of the hub; never logged
  std::string ca_file;  // PEM; empty: the system's authorities
};

// What every dial to one relay shares. Cheap to copy; may be used by several threads.
class RelayDialer {
 public:
  static Result<RelayDialer> create(const RelayOptions& options);

  // The same at another hub of the group, which the first has named; never less protected.
  Result<RelayDialer> at(const std::string& url) const;

  // Connect here, to the relay or to the proxy before it, and give the socket to open().
  const HostPort& dial_address() const;
  bool through_proxy() const;
  // What the payload will be. Ciphertext is random already and travels as it is; other bytes are
  // masked with a random key, as RFC 6455 wants it (docs/decisions/0005-relay-frames.md).
  enum class Payload { kCiphertext, kAnyBytes };
  // The handshakes (CONNECT, TLS, the WebSocket's) run inside the first reads and writes.
  // kFixInput: the relay refuses us as we are (token, session); kRetryLater: not just now, no
  // worker waits; kRetryElsewhere: the connection failed.
  Result<std::unique_ptr<WebSocketStream>> open(Fd fd, std::string_view session,
                                                Payload payload = Payload::kAnyBytes) const;

 private:
  struct Plan;
  friend class RelayedStream;
  explicit RelayDialer(std::shared_ptr<const Plan> plan) : plan_(std::move(plan)) {}
  std::shared_ptr<const Plan> plan_;
};

}  // namespace kvasir::net
