// A worker's key and self-signed certificate, made once and kept in one file that only its
// owner can read. The certificate never expires: trust comes from its pinned fingerprint.
#pragma once

#include <array>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "base/error.h"

struct evp_pkey_st;
struct x509_st;

namespace kvasir::net {

// SHA-256 of a certificate's DER bytes. Written as 64 hexadecimal digits.
using Fingerprint = std::array<std::byte, 32>;

Result<Fingerprint> parse_fingerprint(std::string_view text);
std::string format_fingerprint(const Fingerprint& fingerprint);

struct TlsIdentity {
  std::shared_ptr<evp_pkey_st> key;
  std::shared_ptr<x509_st> certificate;
  Fingerprint fingerprint{};
};

inline constexpr std::string_view kTlsIdentityFile = "tls-identity.pem";

// In memory only.
Result<TlsIdentity> make_tls_identity();
// Reads `data_dir`/tls-identity.pem, or makes it (0600, the directory 0700) if it does not
// exist; of two processes that start at once both end with the same one. Refuses a file that
// others can read.
Result<TlsIdentity> load_or_make_tls_identity(const std::filesystem::path& data_dir);

}  // namespace kvasir::net
