// TLS 1.3 streams over any stream. A server shows a self-signed certificate; a client knows its
// SHA-256 fingerprint beforehand (from the worker's link or the hub's coverage) and accepts no
// other. No certificate authority, no host names. Only hubs are known by name, as web servers
// are: their certificates are an authority's.
//
// A client's context keeps the last session of each fingerprint, so that a reconnect needs no
// certificate: only an end that knew the pinned key can take such a session up again. No early
// data: nothing that a replay could repeat.
//
// A context may be shared by threads; a stream may not.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "net/stream.h"
#include "net/tls_identity.h"

struct ssl_ctx_st;

namespace kvasir::net {

class TlsSessions;

class TlsContext {
 public:
  static Result<TlsContext> server(const TlsIdentity& identity);
  static Result<TlsContext> client();
  // For make_tls_client_stream with a host's name. `ca_file`: PEM; empty: the system's
  // authorities. TLS 1.2 is taken, too: the proxy before a hub may know no better.
  static Result<TlsContext> client_by_authorities(const std::string& ca_file);

  ssl_ctx_st* get() const { return context_.get(); }
  const std::shared_ptr<TlsSessions>& sessions() const { return sessions_; }

 private:
  TlsContext(std::shared_ptr<ssl_ctx_st> context, std::shared_ptr<TlsSessions> sessions)
      : context_(std::move(context)), sessions_(std::move(sessions)) {}
  std::shared_ptr<ssl_ctx_st> context_;
  std::shared_ptr<TlsSessions> sessions_;  // of a client
};

// `lower` carries the bytes, `fd` is a connected, non-blocking stream socket. The handshake runs inside the first reads
// and writes; a fingerprint that differs is an error of theirs, and no byte of the caller's
// has left by then.
Result<std::unique_ptr<Stream>> make_tls_server_stream(std::unique_ptr<Stream> lower, const TlsContext& context);
Result<std::unique_ptr<Stream>> make_tls_server_stream(Fd fd, const TlsContext& context);
Result<std::unique_ptr<Stream>> make_tls_client_stream(std::unique_ptr<Stream> lower, const TlsContext& context,
                                                       const Fingerprint& pinned);
Result<std::unique_ptr<Stream>> make_tls_client_stream(Fd fd, const TlsContext& context, const Fingerprint& pinned);

// A server whose certificate must be made out to `host`, a name or an address. One that is not is
// kFixInput in the first reads and writes.
Result<std::unique_ptr<Stream>> make_tls_client_stream(std::unique_ptr<Stream> lower, const TlsContext& context,
                                                       const std::string& host);

// Of a stream made above, after its handshake; nullopt otherwise.
struct TlsState {
  bool resumed = false;
  // RFC 9266 in spirit: 32 bytes that only the two ends of this very connection know. What is
  // signed over them cannot be shown on another connection.
  std::array<std::byte, 32> binding{};
};
std::optional<TlsState> tls_state(const Stream& stream);

}  // namespace kvasir::net
