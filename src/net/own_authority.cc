#include "net/own_authority.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <format>
#include <fstream>
#include <memory>
#include <optional>
#include <utility>

#include "net/openssl_error.h"
#include "net/private_file.h"

namespace kvasir::net {
namespace {

namespace fs = std::filesystem;

constexpr off_t kPemBytesMax = 64 << 10;
constexpr const char* kAuthorityFile = "hub-ca.pem";
constexpr const char* kAuthorityKeyFile = "hub-ca.key";  // with its certificate
constexpr const char* kServerFile = "hub-cert.pem";
constexpr const char* kServerKeyFile = "hub-cert.key";

using BioPtr = std::unique_ptr<BIO, decltype([](BIO* bio) { BIO_free_all(bio); })>;
using KeyPtr = std::unique_ptr<EVP_PKEY, decltype([](EVP_PKEY* key) { EVP_PKEY_free(key); })>;
using CertificatePtr = std::unique_ptr<X509, decltype([](X509* certificate) { X509_free(certificate); })>;
using ExtensionPtr = std::unique_ptr<X509_EXTENSION, decltype([](X509_EXTENSION* e) { X509_EXTENSION_free(e); })>;

std::unexpected<Error> openssl_failed(std::string_view what) {
  return fatal(std::format("cannot {}: {}.", what, openssl_error_text()));
}

Bytes bytes_of(BIO* bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  const ByteSpan bytes = std::as_bytes(std::span(data, static_cast<std::size_t>(size)));
  return Bytes(bytes.begin(), bytes.end());
}

// The PEM text of a key, its certificate, or both.
Result<Bytes> to_pem(EVP_PKEY* key, X509* certificate) {
  const BioPtr bio(BIO_new(key != nullptr ? BIO_s_secmem() : BIO_s_mem()));
  const bool written =
      bio &&
      (key == nullptr || PEM_write_bio_PKCS8PrivateKey(bio.get(), key, nullptr, nullptr, 0, nullptr, nullptr) == 1) &&
      (certificate == nullptr || PEM_write_bio_X509(bio.get(), certificate) == 1);
  if (!written) return openssl_failed("write a TLS key");
  return bytes_of(bio.get());
}

struct Signer {
  KeyPtr key;
  CertificatePtr certificate;
};

// Signed by itself, or by `by`.
Result<CertificatePtr> make_certificate(EVP_PKEY* key, const std::string& common_name, const Signer* by,
                                        const std::vector<std::pair<int, std::string>>& extensions) {
  CertificatePtr out(X509_new());
  X509* const certificate = out.get();
  if (certificate == nullptr) return openssl_failed("make a certificate");
  X509* const issuer = by != nullptr ? by->certificate.get() : certificate;
  std::uint64_t serial = 0;
  X509_NAME* const name = X509_get_subject_name(certificate);
  // Wide enough for a clock that is wrong by decades; RFC 5280's "no expiry" date.
  bool made = RAND_bytes(reinterpret_cast<unsigned char*>(&serial), sizeof serial) == 1 &&
              ASN1_INTEGER_set_uint64(X509_get_serialNumber(certificate), serial >> 1 | 1) == 1 &&
              X509_set_version(certificate, X509_VERSION_3) == 1 &&
              X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_UTF8,
                                         reinterpret_cast<const unsigned char*>(common_name.c_str()), -1, -1, 0) == 1 &&
              X509_set_issuer_name(certificate, X509_get_subject_name(issuer)) == 1 &&
              ASN1_TIME_set_string_X509(X509_getm_notBefore(certificate), "19700101000000Z") == 1 &&
              ASN1_TIME_set_string_X509(X509_getm_notAfter(certificate), "99991231235959Z") == 1 &&
              X509_set_pubkey(certificate, key) == 1;
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  for (const auto& [kind, value] : extensions) {
    const ExtensionPtr extension(made ? X509V3_EXT_conf_nid(nullptr, &context, kind, value.c_str()) : nullptr);
    made = made && extension && X509_add_ext(certificate, extension.get(), -1) == 1;
  }
  if (!made || X509_sign(certificate, by != nullptr ? by->key.get() : key, EVP_sha256()) == 0)
    return openssl_failed("make a certificate");
  return out;
}

KeyPtr make_key() { return KeyPtr(EVP_PKEY_Q_keygen(nullptr, nullptr, "EC", "P-256")); }

// The key, and what certificate is with it, of a file that may have to be made first.
Result<Signer> load_or_make(const fs::path& path, bool authority) {
  std::optional<Bytes> pem;
  KVASIR_ASSIGN(pem, read_private_file(path, kPemBytesMax));
  if (!pem) {
    const KeyPtr key = make_key();
    if (!key) return openssl_failed("make a TLS key");
    CertificatePtr certificate;
    if (authority) {
      KVASIR_ASSIGN(certificate, make_certificate(key.get(), "kvasir hub authority", nullptr,
                                                  {{NID_basic_constraints, "critical,CA:TRUE,pathlen:0"},
                                                   {NID_key_usage, "critical,keyCertSign"},
                                                   {NID_subject_key_identifier, "hash"}}));
    }
    KVASIR_ASSIGN(const Bytes fresh, to_pem(key.get(), certificate.get()));
    // Of two processes that start at once both end with the same one.
    KVASIR_TRY(create_private_file(path, fresh));
    KVASIR_ASSIGN(pem, read_private_file(path, kPemBytesMax));
    if (!pem) return fatal(std::format("'{}' appeared and vanished; start one process at a time.", path.string()));
  }
  const auto open = [&] { return BioPtr(BIO_new_mem_buf(pem->data(), static_cast<int>(pem->size()))); };
  Signer out{KeyPtr(PEM_read_bio_PrivateKey(open().get(), nullptr, nullptr, nullptr)),
             CertificatePtr(authority ? PEM_read_bio_X509(open().get(), nullptr, nullptr, nullptr) : nullptr)};
  const bool paired = !authority || (out.certificate && out.key &&
                                     X509_check_private_key(out.certificate.get(), out.key.get()) == 1);
  if (!out.key || !paired) {
    openssl_error_text();
    return fix_input(std::format("'{}' holds no valid key; delete it to get a new one.", path.string()));
  }
  return out;
}

Status write_public(const fs::path& path, X509* certificate) {
  KVASIR_ASSIGN(const Bytes pem, to_pem(nullptr, certificate));
  const fs::path temporary = path.string() + ".tmp";
  std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(pem.data()), static_cast<std::streamsize>(pem.size()));
  out.close();
  std::error_code error;
  if (out) fs::rename(temporary, path, error);
  if (!out || error) return fix_input(std::format("'{}' cannot be written.", path.string()));
  return {};
}

bool is_address(const std::string& name) {
  std::array<unsigned char, 16> ignored;
  return ::inet_pton(AF_INET, name.c_str(), ignored.data()) == 1 ||
         ::inet_pton(AF_INET6, name.c_str(), ignored.data()) == 1;
}

}  // namespace

Result<OwnCertificate> make_own_certificate(const fs::path& data_dir, const std::vector<std::string>& names) {
  KVASIR_ASSIGN(const Signer authority, load_or_make(data_dir / kAuthorityKeyFile, true));
  KVASIR_ASSIGN(const Signer server, load_or_make(data_dir / kServerKeyFile, false));
  std::string alternatives;
  for (const std::string& name : names) {
    // What has a comma or the like in it is no name, and would be read as several.
    if (name.empty() || name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-.:_") !=
                            std::string::npos)
      return fix_input(std::format("'{}' is no host name.", name));
    alternatives += std::format("{}{}:{}", alternatives.empty() ? "" : ",", is_address(name) ? "IP" : "DNS", name);
  }
  KVASIR_ASSIGN(const CertificatePtr certificate,
                make_certificate(server.key.get(), "kvasir hub", &authority,
                                 {{NID_basic_constraints, "critical,CA:FALSE"},
                                  {NID_key_usage, "critical,digitalSignature"},
                                  {NID_ext_key_usage, "serverAuth"},
                                  {NID_subject_alt_name, alternatives},
                                  {NID_authority_key_identifier, "keyid"}}));
  KVASIR_TRY(write_public(data_dir / kAuthorityFile, authority.certificate.get()));
  KVASIR_TRY(write_public(data_dir / kServerFile, certificate.get()));
  return OwnCertificate{.authority_file = data_dir / kAuthorityFile,
                        .certificate_file = data_dir / kServerFile,
                        .key_file = data_dir / kServerKeyFile};
}

std::vector<std::string> own_names() {
  std::vector<std::string> out = {"localhost"};
  const auto add = [&out](std::string name) {
    if (std::ranges::find(out, name) == out.end()) out.push_back(std::move(name));
  };
  std::array<char, 256> host{};
  const bool plain = ::gethostname(host.data(), host.size() - 1) == 0 && host[0] != '\0' &&
                     std::string_view(host.data()).find_first_not_of(
                         "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-.") == std::string_view::npos;
  if (plain) {
    add(host.data());
    if (!std::string_view(host.data()).contains('.')) add(std::string(host.data()) + ".local");
  }
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return out;
  for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr) continue;
    const int family = each->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    std::array<char, NI_MAXHOST> text{};
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (::getnameinfo(each->ifa_addr, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) continue;
    if (!std::string_view(text.data()).contains('%')) add(text.data());  // of one link alone
  }
  ::freeifaddrs(all);
  return out;
}

}  // namespace kvasir::net
