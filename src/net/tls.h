// TLS 1.3 streams. A server shows a self-signed certificate; a client knows its SHA-256
// fingerprint beforehand (from the worker's link or the hub's coverage) and accepts no
// other. No certificate authority, no host names, no resumption.
//
// A context may be shared by threads; a stream may not.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "base/error.h"
#include "net/stream.h"
#include "net/tls_identity.h"

struct ssl_ctx_st;

namespace kvasir::net {

class TlsContext {
 public:
  static Result<TlsContext> server(const TlsIdentity& identity);
  static Result<TlsContext> client();

  ssl_ctx_st* get() const { return context_.get(); }

 private:
  explicit TlsContext(std::shared_ptr<ssl_ctx_st> context) : context_(std::move(context)) {}
  std::shared_ptr<ssl_ctx_st> context_;
};

// `fd` is a connected, non-blocking stream socket. The handshake runs inside the first reads
// and writes; a fingerprint that differs is an error of theirs, and no byte of the caller's
// has left by then.
Result<std::unique_ptr<Stream>> make_tls_server_stream(Fd fd, const TlsContext& context);
Result<std::unique_ptr<Stream>> make_tls_client_stream(Fd fd, const TlsContext& context, const Fingerprint& pinned);

}  // namespace kvasir::net
