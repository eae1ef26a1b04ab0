#include "net/tls_identity.h"

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509.h>

#include <algorithm>
#include <cerrno>
#include <format>

#include "base/bytes.h"
#include "base/hex.h"
#include "net/fd.h"
#include "net/openssl_error.h"
#include "net/private_file.h"

namespace kvasir::net {
namespace {

namespace fs = std::filesystem;

constexpr off_t kIdentityFileBytesMax = 64 << 10;

using BioPtr = std::unique_ptr<BIO, decltype([](BIO* bio) { BIO_free_all(bio); })>;

std::shared_ptr<EVP_PKEY> own(EVP_PKEY* key) { return {key, EVP_PKEY_free}; }
std::shared_ptr<X509> own(X509* certificate) { return {certificate, X509_free}; }

std::unexpected<Error> openssl_failed(std::string_view what) {
  return fatal(std::format("cannot {}: {}.", what, openssl_error_text()));
}

Result<Fingerprint> fingerprint_of(const X509* certificate) {
  Fingerprint out;
  unsigned length = 0;
  if (X509_digest(certificate, EVP_sha256(), reinterpret_cast<unsigned char*>(out.data()), &length) != 1 ||
      length != out.size())
    return openssl_failed("hash a certificate");
  return out;
}

Result<TlsIdentity> from_pem(ByteSpan pem, const fs::path& path) {
  const auto refuse = [&] {
    openssl_error_text();
    return fix_input(
        std::format("'{}' holds no valid key and certificate; delete it to get a new identity.", path.string()));
  };
  const auto open = [&] { return BioPtr(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size()))); };
  TlsIdentity identity;
  identity.key = own(PEM_read_bio_PrivateKey(open().get(), nullptr, nullptr, nullptr));
  identity.certificate = own(PEM_read_bio_X509(open().get(), nullptr, nullptr, nullptr));
  if (!identity.key || !identity.certificate ||
      X509_check_private_key(identity.certificate.get(), identity.key.get()) != 1)
    return refuse();
  KVASIR_ASSIGN(identity.fingerprint, fingerprint_of(identity.certificate.get()));
  return identity;
}

Result<Bytes> to_pem(const TlsIdentity& identity) {
  const BioPtr bio(BIO_new(BIO_s_secmem()));
  if (!bio ||
      PEM_write_bio_PKCS8PrivateKey(bio.get(), identity.key.get(), nullptr, nullptr, 0, nullptr, nullptr) != 1 ||
      PEM_write_bio_X509(bio.get(), identity.certificate.get()) != 1)
    return openssl_failed("write a TLS key");
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &data);
  const ByteSpan bytes = std::as_bytes(std::span(data, static_cast<std::size_t>(size)));
  return Bytes(bytes.begin(), bytes.end());
}

}  // namespace

Result<Fingerprint> parse_fingerprint(std::string_view text) {
  const auto bytes = from_hex(text);
  Fingerprint out;
  if (!bytes || bytes->size() != out.size())
    return fix_input(
        std::format("'{}' is not a certificate fingerprint; copy the 64 hexadecimal digits from the worker's link.",
                    text.substr(0, 80)));
  std::ranges::copy(*bytes, out.begin());
  return out;
}

std::string format_fingerprint(const Fingerprint& fingerprint) { return to_hex(fingerprint); }

Result<TlsIdentity> make_tls_identity() {
  TlsIdentity identity;
  identity.key = own(EVP_PKEY_Q_keygen(nullptr, nullptr, "EC", "P-256"));
  identity.certificate = own(X509_new());
  if (!identity.key || !identity.certificate) return openssl_failed("make a TLS key");
  X509* certificate = identity.certificate.get();
  // 63 random bits: positive, and no two certificates alike.
  std::uint64_t serial = 0;
  X509_NAME* name = X509_get_subject_name(certificate);
  const bool made =
      RAND_bytes(reinterpret_cast<unsigned char*>(&serial), sizeof serial) == 1 &&
      ASN1_INTEGER_set_uint64(X509_get_serialNumber(certificate), serial >> 1 | 1) == 1 &&
      X509_set_version(certificate, X509_VERSION_3) == 1 &&
      X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>("kvasir worker"), -1,
                                 -1, 0) == 1 &&
      X509_set_issuer_name(certificate, name) == 1 &&
      // Wide enough for a clock that is wrong by decades; RFC 5280's "no expiry" date.
      ASN1_TIME_set_string_X509(X509_getm_notBefore(certificate), "19700101000000Z") == 1 &&
      ASN1_TIME_set_string_X509(X509_getm_notAfter(certificate), "99991231235959Z") == 1 &&
      X509_set_pubkey(certificate, identity.key.get()) == 1 &&
      X509_sign(certificate, identity.key.get(), EVP_sha256()) != 0;
  if (!made) return openssl_failed("make a certificate");
  KVASIR_ASSIGN(identity.fingerprint, fingerprint_of(certificate));
  return identity;
}

Result<TlsIdentity> load_or_make_tls_identity(const fs::path& data_dir) {
  const fs::path path = data_dir / kTlsIdentityFile;
  std::error_code error;
  if (!fs::exists(data_dir, error)) {
    fs::create_directories(data_dir, error);
    if (!error) fs::permissions(data_dir, fs::perms::owner_all, error);
    if (error)
      return fix_input(
          std::format("cannot make the directory '{}': {}; give another one.", data_dir.string(), error.message()));
  }
  KVASIR_ASSIGN(std::optional<Bytes> pem, read_private_file(path, kIdentityFileBytesMax));
  if (pem) return from_pem(*pem, path);

  KVASIR_ASSIGN(TlsIdentity identity, make_tls_identity());
  KVASIR_ASSIGN(const Bytes fresh, to_pem(identity));
  KVASIR_ASSIGN(const bool created, create_private_file(path, fresh));
  if (created) return identity;
  KVASIR_ASSIGN(pem, read_private_file(path, kIdentityFileBytesMax));  // another process was first
  if (!pem) return fatal(std::format("'{}' appeared and vanished; start one process at a time.", path.string()));
  return from_pem(*pem, path);
}

}  // namespace kvasir::net
