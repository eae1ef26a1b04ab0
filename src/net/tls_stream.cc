// TLS by OpenSSL, with the fewest system calls a round can cost:
//  - reading: the stream below receives straight into OpenSSL's record buffer, with read-ahead
//    over many records, so a frame of several records costs one recv and no copy of ours;
//  - writing: OpenSSL would send each 16 KiB record by a call of its own. Records gather in
//    memory instead and leave together. That copy runs at memory speed; a call, and the
//    early wake-up of the peer for a part of a frame, cost more.

#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <format>
#include <map>
#include <optional>

#include "base/bytes.h"
#include "base/mutex.h"
#include "net/openssl_error.h"
#include "net/tls.h"

namespace kvasir::net {
namespace {

constexpr std::size_t kRecordBytes = 16 << 10;       // plaintext of a full TLS record
constexpr std::size_t kRecordExtraBytes = 22;        // of TLS 1.3: header, kind and tag
constexpr std::size_t kWriteBatchBytes = 128 << 10;  // plaintext encrypted before one send
constexpr std::size_t kWriteTailBytes = 32 << 10;    // a rest this small goes with the last batch
// What one send brought, by one recv. Whole records: OpenSSL fetches the rest of one that was cut by a call of
// its own. It aligns the first one's payload.
constexpr std::size_t kReadAheadBytes =
    (kWriteBatchBytes + kWriteTailBytes) / kRecordBytes * (kRecordBytes + kRecordExtraBytes) + 8;
constexpr std::size_t kTickets = 1;                  // for one reconnect; it brings the next
constexpr std::size_t kSessionsMax = 256;            // fingerprints whose last session is kept

using SslPtr = std::unique_ptr<SSL, decltype([](SSL* ssl) { SSL_free(ssl); })>;

std::unexpected<Error> tls_failed(std::string_view what) {
  return retry_elsewhere(std::format("{}: {}.", what, openssl_error_text()));
}

// --- a BIO that reads from the stream below ---------------------------------------------

struct Below {
  std::unique_ptr<Stream> stream;
  std::optional<Error> error;  // its last one
  bool ended = false;
};

int below_read(BIO* bio, char* data, std::size_t size, std::size_t* n) {
  auto& below = *static_cast<Below*>(BIO_get_data(bio));
  BIO_clear_retry_flags(bio);
  *n = 0;
  Result<IoResult> got = below.stream->read_some(std::as_writable_bytes(std::span(data, size)));
  if (!got) {
    below.error = std::move(got).error();
    return 0;
  }
  if (got->state == IoState::kDone) {
    *n = got->bytes;
    return 1;
  }
  if (got->state == IoState::kWouldBlock) BIO_set_retry_read(bio);
  else below.ended = true;
  return 0;
}

long below_ctrl(BIO* bio, int command, long, void*) {
  return command == BIO_CTRL_EOF && static_cast<Below*>(BIO_get_data(bio))->ended ? 1 : 0;
}

BIO* make_below_bio(Below& below) {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "kvasir stream");
    if (made != nullptr) {
      BIO_meth_set_read_ex(made, below_read);
      BIO_meth_set_ctrl(made, below_ctrl);
    }
    return made;
  }();
  BIO* bio = method == nullptr ? nullptr : BIO_new(method);
  if (bio == nullptr) return nullptr;
  BIO_set_data(bio, &below);
  BIO_set_init(bio, 1);
  return bio;
}

// --- a BIO that appends to a byte vector ------------------------------------------------

int gather_write(BIO* bio, const char* data, std::size_t size, std::size_t* written) {
  auto& out = *static_cast<Bytes*>(BIO_get_data(bio));
  const ByteSpan bytes = std::as_bytes(std::span(data, size));
  out.insert(out.end(), bytes.begin(), bytes.end());
  *written = size;
  return 1;
}

long gather_ctrl(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

BIO* make_gather_bio(Bytes& out) {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "kvasir gather");
    if (made != nullptr) {
      BIO_meth_set_write_ex(made, gather_write);
      BIO_meth_set_ctrl(made, gather_ctrl);
    }
    return made;
  }();
  BIO* bio = method == nullptr ? nullptr : BIO_new(method);
  if (bio == nullptr) return nullptr;
  BIO_set_data(bio, &out);
  BIO_set_init(bio, 1);
  return bio;
}

// --- pinning ----------------------------------------------------------------------------

struct Pin {
  Fingerprint expected{};
  TlsSessions* sessions = nullptr;
  std::optional<Fingerprint> refused;  // what the peer showed instead
};

int pin_index() {
  static const int index = SSL_get_ex_new_index(0, nullptr, nullptr, nullptr, nullptr);
  return index;
}

// Replaces chain building: the leaf's fingerprint decides. That the peer holds its key is
// proved by the handshake itself.
int verify_pin(X509_STORE_CTX* store, void*) {
  const auto* ssl = static_cast<SSL*>(X509_STORE_CTX_get_ex_data(store, SSL_get_ex_data_X509_STORE_CTX_idx()));
  auto* pin = static_cast<Pin*>(SSL_get_ex_data(ssl, pin_index()));
  const X509* leaf = X509_STORE_CTX_get0_cert(store);
  Fingerprint shown;
  unsigned length = 0;
  if (pin != nullptr && leaf != nullptr &&
      X509_digest(leaf, EVP_sha256(), reinterpret_cast<unsigned char*>(shown.data()), &length) == 1 &&
      length == shown.size()) {
    if (CRYPTO_memcmp(shown.data(), pin->expected.data(), shown.size()) == 0) return 1;
    pin->refused = shown;
  }
  X509_STORE_CTX_set_error(store, X509_V_ERR_CERT_REJECTED);
  return 0;
}

}  // namespace

// The last session of each fingerprint, each used once: a ticket shown twice would link the two
// connections for whoever watches.
class TlsSessions {
 public:
  using SessionPtr = std::unique_ptr<SSL_SESSION, decltype([](SSL_SESSION* session) { SSL_SESSION_free(session); })>;

  void put(const Fingerprint& fingerprint, SessionPtr session) {
    const MutexLock lock(mutex_);
    if (sessions_.size() >= kSessionsMax && !sessions_.contains(fingerprint)) sessions_.erase(sessions_.begin());
    sessions_[fingerprint] = std::move(session);
  }
  SessionPtr take(const Fingerprint& fingerprint) {
    const MutexLock lock(mutex_);
    const auto found = sessions_.find(fingerprint);
    if (found == sessions_.end()) return nullptr;
    SessionPtr session = std::move(found->second);
    sessions_.erase(found);
    return session;
  }

 private:
  Mutex mutex_;
  std::map<Fingerprint, SessionPtr> sessions_ KVASIR_GUARDED_BY(mutex_);
};

namespace {

int keep_session(SSL* ssl, SSL_SESSION* session) {
  const auto* pin = static_cast<const Pin*>(SSL_get_ex_data(ssl, pin_index()));
  if (pin == nullptr || pin->sessions == nullptr) return 0;
  // A copy: OpenSSL voids a session whose connection ends without a goodbye, and a lost
  // connection is just when a quick one is wanted.
  if (TlsSessions::SessionPtr copy(SSL_SESSION_dup(session)); copy) pin->sessions->put(pin->expected, std::move(copy));
  return 0;
}

// --- the stream -------------------------------------------------------------------------

constexpr std::string_view kBindingLabel = "EXPORTER-kvasir-grant";

class TlsStream final : public Stream {
 public:
  explicit TlsStream(std::unique_ptr<Stream> lower) : Stream(Fd()), below_{.stream = std::move(lower), .error = {}} {}

  // A client knows the server's fingerprint or its name; a server neither.
  Status init(const TlsContext& context, const Fingerprint* pinned, const std::string* host = nullptr) {
    ERR_clear_error();
    ssl_.reset(SSL_new(context.get()));
    if (!ssl_) return tls_failed("cannot make a TLS connection");
    BIO* read_bio = make_below_bio(below_);
    BIO* write_bio = make_gather_bio(output_);
    if (read_bio == nullptr || write_bio == nullptr) {
      BIO_free(read_bio);
      BIO_free(write_bio);
      return tls_failed("cannot make a TLS connection");
    }
    SSL_set_bio(ssl_.get(), read_bio, write_bio);
    if (pinned != nullptr) {
      pin_.expected = *pinned;
      sessions_ = context.sessions();
      pin_.sessions = sessions_.get();
      if (SSL_set_ex_data(ssl_.get(), pin_index(), &pin_) != 1) return tls_failed("cannot make a TLS connection");
      SSL_set_connect_state(ssl_.get());
      // A session that cannot be used costs nothing: the handshake is then a full one.
      if (const auto session = sessions_ ? sessions_->take(*pinned) : nullptr)
        SSL_set_session(ssl_.get(), session.get());
    } else if (host != nullptr) {
      host_ = *host;
      SSL_set_connect_state(ssl_.get());
      KVASIR_TRY(expect_host());
    } else {
      SSL_set_accept_state(ssl_.get());
    }
    return {};
  }

  Result<IoResult> read_some(std::span<std::byte> into) override {
    KVASIR_ASSIGN(const bool ready, handshake());
    if (!ready) return IoResult{IoState::kWouldBlock, 0};
    std::size_t total = 0;
    do {
      std::size_t n = 0;
      ERR_clear_error();
      if (SSL_read_ex(ssl_.get(), into.data() + total, into.size() - total, &n) != 1) {
        const int error = SSL_get_error(ssl_.get(), 0);
        read_blocked_ = error == SSL_ERROR_WANT_READ;
        if (total > 0) break;  // an error or the end comes again at the next call
        if (error == SSL_ERROR_ZERO_RETURN) return IoResult{IoState::kEnd, 0};
        if (!read_blocked_) return failed("the TLS connection broke");
        KVASIR_TRY(flush());  // a key update wants its answer
        return IoResult{IoState::kWouldBlock, 0};
      }
      read_blocked_ = false;
      total += n;
      // Only records that are here already: asking for more would cost a call.
    } while (total < into.size() && SSL_has_pending(ssl_.get()) == 1);
    return IoResult{IoState::kDone, total};
  }

  Result<IoResult> write_some(std::span<const iovec> parts) override {
    write_awaits_input_ = false;
    KVASIR_ASSIGN(const bool ready, handshake());
    write_awaits_input_ = !ready;
    KVASIR_ASSIGN(const bool flushed, flush());
    if (!ready || !flushed) return IoResult{IoState::kWouldBlock, 0};

    std::size_t total = 0;
    for (const iovec& each : parts) total += each.iov_len;
    lower().expect_to_write(total + (total + kRecordBytes - 1) / kRecordBytes * kRecordExtraBytes);
    const std::size_t batch = total <= kWriteBatchBytes + kWriteTailBytes ? total : kWriteBatchBytes;

    std::size_t accepted = 0;
    std::size_t part = 0;
    std::size_t at = 0;  // in parts[part]
    while (accepted < batch) {
      while (part < parts.size() && at == parts[part].iov_len) ++part, at = 0;
      if (part == parts.size()) break;
      const auto* data = static_cast<const std::byte*>(parts[part].iov_base) + at;
      std::size_t size = std::min(parts[part].iov_len - at, batch - accepted);
      if (size >= kRecordBytes) {
        size -= size % kRecordBytes;  // full records straight from the caller's memory
        at += size;
      } else {
        // Small parts share a record: a frame's head and table go with its first rows.
        staging_.clear();
        while (part < parts.size() && staging_.size() < kRecordBytes) {
          const auto* from = static_cast<const std::byte*>(parts[part].iov_base) + at;
          const std::size_t n = std::min(parts[part].iov_len - at, kRecordBytes - staging_.size());
          staging_.insert(staging_.end(), from, from + n);
          at += n;
          if (at == parts[part].iov_len) ++part, at = 0;
        }
        data = staging_.data();
        size = staging_.size();
      }
      KVASIR_TRY(encrypt({data, size}));
      accepted += size;
    }
    KVASIR_TRY(flush());
    return IoResult{IoState::kDone, accepted};
  }

  short wants(bool reading) const override {
    return static_cast<short>(lower().wants(reading || write_awaits_input_) | (own_output() ? POLLOUT : 0));
  }
  bool buffered_input() const override {
    return (!read_blocked_ && SSL_has_pending(ssl_.get()) == 1) || lower().buffered_input();
  }
  bool buffered_output() const override { return own_output() || lower().buffered_output(); }
  bool encrypted() const override { return true; }
  int fd() const override { return lower().fd(); }

  std::optional<TlsState> state() const {
    if (!established_) return std::nullopt;
    TlsState out{.resumed = SSL_session_reused(ssl_.get()) == 1};
    if (SSL_export_keying_material(ssl_.get(), reinterpret_cast<unsigned char*>(out.binding.data()), out.binding.size(),
                                   kBindingLabel.data(), kBindingLabel.size(), nullptr, 0, 0) != 1) {
      ERR_clear_error();
      return std::nullopt;
    }
    return out;
  }

  void shutdown() override {
    ERR_clear_error();
    if (SSL_is_init_finished(ssl_.get()) == 1) SSL_shutdown(ssl_.get());  // the goodbye goes to output_
    ERR_clear_error();
    static_cast<void>(flush());  // best effort: the peer may be gone
    lower().shutdown();
  }

 private:
  Stream& lower() const { return *below_.stream; }

  Status expect_host() {
    if (X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl_.get()), host_.c_str()) == 1) return {};
    ERR_clear_error();
    // The last is what OpenSSL's macro for the name in the greeting does.
    if (SSL_set1_host(ssl_.get(), host_.c_str()) != 1 ||
        SSL_ctrl(ssl_.get(), SSL_CTRL_SET_TLSEXT_HOSTNAME, TLSEXT_NAMETYPE_host_name, host_.data()) != 1)
      return tls_failed("cannot make a TLS connection");
    return {};
  }
  bool own_output() const { return output_at_ < output_.size(); }

  // true when the handshake is done.
  Result<bool> handshake() {
    if (established_) return true;
    ERR_clear_error();
    const int done = SSL_do_handshake(ssl_.get());
    const int error = done == 1 ? SSL_ERROR_NONE : SSL_get_error(ssl_.get(), done);
    if (error == SSL_ERROR_NONE || error == SSL_ERROR_WANT_READ) {
      KVASIR_TRY(flush());
      established_ = done == 1;
      if (established_) read_blocked_ = false;  // records may have come along with the last message
      return established_;
    }
    auto refused = failed("the TLS handshake failed");
    static_cast<void>(flush());  // the alert that tells the peer why
    return refused;
  }

  std::unexpected<Error> failed(std::string_view what) {
    if (pin_.refused) {
      ERR_clear_error();
      return retry_elsewhere(std::format("the worker's certificate is {} and not the pinned {}; "
                                         "if its identity was renewed, use its new link.",
                                         format_fingerprint(*pin_.refused), format_fingerprint(pin_.expected)));
    }
    if (const long verdict = SSL_get_verify_result(ssl_.get()); !host_.empty() && verdict != X509_V_OK) {
      ERR_clear_error();
      return fix_input(std::format("'{}' shows a certificate that cannot be verified ({}); give its authority's "
                                   "certificate if it is its own.",
                                   host_, X509_verify_cert_error_string(verdict)));
    }
    if (below_.error) {
      ERR_clear_error();
      return std::unexpected(*below_.error);
    }
    if (ERR_GET_REASON(ERR_peek_last_error()) == SSL_R_UNEXPECTED_EOF_WHILE_READING) {
      ERR_clear_error();
      return retry_elsewhere("the peer closed the connection without ending its TLS stream.");
    }
    return tls_failed(what);
  }

  // The gathering BIO takes everything, so a write of an established connection is whole.
  Status encrypt(ByteSpan bytes) {
    ERR_clear_error();
    std::size_t written = 0;
    if (SSL_write_ex(ssl_.get(), bytes.data(), bytes.size(), &written) != 1 || written != bytes.size())
      return tls_failed("the TLS connection broke");
    return {};
  }

  // Sends gathered records: true when none is left.
  Result<bool> flush() {
    while (own_output()) {
      const iovec rest{output_.data() + output_at_, output_.size() - output_at_};
      KVASIR_ASSIGN(const IoResult sent, lower().write_some({&rest, 1}));
      if (sent.state != IoState::kDone) return false;
      output_at_ += sent.bytes;
    }
    output_.clear();
    output_at_ = 0;
    if (lower().buffered_output()) KVASIR_TRY(lower().write_some({}));
    return true;
  }

  Below below_;
  std::shared_ptr<TlsSessions> sessions_;
  Pin pin_;
  std::string host_;  // empty: known by its fingerprint, or a client
  Bytes output_;  // records not sent yet start at output_at_; at most one batch
  std::size_t output_at_ = 0;
  Bytes staging_;
  SslPtr ssl_;  // after what its BIO and callback point to
  bool established_ = false;
  bool read_blocked_ = true;
  bool write_awaits_input_ = false;
};

Result<std::shared_ptr<SSL_CTX>> make_context(const SSL_METHOD* method, int version_min = TLS1_3_VERSION) {
  ERR_clear_error();
  std::shared_ptr<SSL_CTX> context(SSL_CTX_new(method), SSL_CTX_free);
  if (!context || SSL_CTX_set_min_proto_version(context.get(), version_min) != 1 ||
      // AES-128 first: the fastest where AES instructions exist, and they nearly always do.
      SSL_CTX_set_ciphersuites(context.get(),
                               "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256") != 1 ||
      SSL_CTX_set_num_tickets(context.get(), kTickets) != 1)
    return fatal("cannot set up TLS 1.3: " + openssl_error_text() + "; check the OpenSSL library.");
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_read_ahead(context.get(), 1);
  SSL_CTX_set_default_read_buffer_len(context.get(), kReadAheadBytes);
  return context;
}

Result<std::unique_ptr<Stream>> make_stream(std::unique_ptr<Stream> lower, const TlsContext& context,
                                            const Fingerprint* pinned, const std::string* host = nullptr) {
  auto stream = std::make_unique<TlsStream>(std::move(lower));
  KVASIR_TRY(stream->init(context, pinned, host));
  return stream;
}

}  // namespace

Result<TlsContext> TlsContext::server(const TlsIdentity& identity) {
  KVASIR_ASSIGN(std::shared_ptr<SSL_CTX> context, make_context(TLS_server_method()));
  if (SSL_CTX_use_certificate(context.get(), identity.certificate.get()) != 1 ||
      SSL_CTX_use_PrivateKey(context.get(), identity.key.get()) != 1)
    return fatal("cannot use the TLS key: " + openssl_error_text() + "; delete it to get a new identity.");
  return TlsContext(std::move(context), nullptr);
}

Result<TlsContext> TlsContext::client() {
  KVASIR_ASSIGN(std::shared_ptr<SSL_CTX> context, make_context(TLS_client_method()));
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  SSL_CTX_set_cert_verify_callback(context.get(), verify_pin, nullptr);
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_CLIENT | SSL_SESS_CACHE_NO_INTERNAL);
  SSL_CTX_sess_set_new_cb(context.get(), keep_session);
  return TlsContext(std::move(context), std::make_shared<TlsSessions>());
}

Result<TlsContext> TlsContext::client_by_authorities(const std::string& ca_file) {
  KVASIR_ASSIGN(std::shared_ptr<SSL_CTX> context, make_context(TLS_client_method(), TLS1_2_VERSION));
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  const int found = ca_file.empty() ? SSL_CTX_set_default_verify_paths(context.get())
                                    : SSL_CTX_load_verify_file(context.get(), ca_file.c_str());
  if (found != 1)
    return fix_input(std::format("the certificates in '{}' cannot be read: {}.",
                                 ca_file.empty() ? "the system's store" : ca_file, openssl_error_text()));
  return TlsContext(std::move(context), nullptr);
}

Result<std::unique_ptr<Stream>> make_tls_server_stream(std::unique_ptr<Stream> lower, const TlsContext& context) {
  return make_stream(std::move(lower), context, nullptr);
}

Result<std::unique_ptr<Stream>> make_tls_server_stream(Fd fd, const TlsContext& context) {
  return make_tls_server_stream(make_plain_stream(std::move(fd)), context);
}

Result<std::unique_ptr<Stream>> make_tls_client_stream(std::unique_ptr<Stream> lower, const TlsContext& context,
                                                       const Fingerprint& pinned) {
  return make_stream(std::move(lower), context, &pinned);
}

Result<std::unique_ptr<Stream>> make_tls_client_stream(Fd fd, const TlsContext& context, const Fingerprint& pinned) {
  return make_tls_client_stream(make_plain_stream(std::move(fd)), context, pinned);
}

Result<std::unique_ptr<Stream>> make_tls_client_stream(std::unique_ptr<Stream> lower, const TlsContext& context,
                                                       const std::string& host) {
  return make_stream(std::move(lower), context, nullptr, &host);
}

std::optional<TlsState> tls_state(const Stream& stream) {
  const auto* tls = dynamic_cast<const TlsStream*>(&stream);
  return tls == nullptr ? std::nullopt : tls->state();
}

}  // namespace kvasir::net
