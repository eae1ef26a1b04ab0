#include "net/grant.h"

#include <openssl/evp.h>
#include <openssl/pem.h>

#include <algorithm>
#include <format>
#include <optional>

#include "base/check.h"
#include "base/hex.h"
#include "net/openssl_error.h"
#include "net/private_file.h"

namespace kvasir::net {
namespace {

constexpr std::string_view kPrefix = "grant1.";
constexpr std::string_view kGrantContext = "kvasir session grant 1";
constexpr std::string_view kProofContext = "kvasir grant proof 1";
constexpr std::size_t kSignatureBytes = 64;
constexpr std::size_t kPayloadBytesMax = 8 + 32 + 3 * (2 + kGrantNameBytesMax);
constexpr off_t kKeyFileBytesMax = 16 << 10;

using BioPtr = std::unique_ptr<BIO, decltype([](BIO* bio) { BIO_free_all(bio); })>;
using ContextPtr = std::unique_ptr<EVP_MD_CTX, decltype([](EVP_MD_CTX* context) { EVP_MD_CTX_free(context); })>;

const unsigned char* raw(ByteSpan bytes) { return reinterpret_cast<const unsigned char*>(bytes.data()); }

bool verify(const PublicKey& key, ByteSpan message, ByteSpan signature) {
  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> pkey(
      EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, raw(key), key.size()), &EVP_PKEY_free);
  const ContextPtr context(EVP_MD_CTX_new());
  const bool right = pkey && context &&
                     EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, pkey.get()) == 1 &&
                     EVP_DigestVerify(context.get(), raw(signature), signature.size(), raw(message), message.size()) == 1;
  openssl_error_text();  // clears what a wrong signature left
  return right;
}

// Signed messages of different purposes never look alike.
Bytes signed_bytes(std::string_view context, ByteSpan a, ByteSpan b = {}) {
  Bytes out;
  ByteWriter writer(out);
  writer.put_bytes(context);
  writer.put(std::uint8_t{0});
  writer.put_bytes(a);
  writer.put_bytes(b);
  return out;
}

Bytes payload_of(const Grant& grant) {
  Bytes out;
  ByteWriter writer(out);
  writer.put(grant.expires_unix_s);
  writer.put_bytes(ByteSpan(grant.backbone_key));
  for (const std::string* name : {&grant.backbone, &grant.worker, &grant.model}) {
    writer.put(static_cast<std::uint16_t>(name->size()));
    writer.put_bytes(*name);
  }
  return out;
}

std::optional<Grant> parse(ByteSpan payload) {
  Grant out;
  ByteCursor cursor(payload);
  out.expires_unix_s = cursor.get<std::uint64_t>();
  std::ranges::copy(cursor.get_bytes(out.backbone_key.size()), out.backbone_key.begin());
  for (std::string* name : {&out.backbone, &out.worker, &out.model}) {
    const ByteSpan text = cursor.get_bytes(cursor.get<std::uint16_t>());
    name->assign(reinterpret_cast<const char*>(text.data()), text.size());
  }
  if (!cursor.at_end()) return std::nullopt;
  return out;
}

// The parts of a token between its dots.
struct Parts {
  Bytes payload, signature;
  std::optional<Bytes> proof;
};
std::optional<Parts> split(std::string_view token) {
  if (!token.starts_with(kPrefix)) return std::nullopt;
  token.remove_prefix(kPrefix.size());
  const auto next = [&token]() -> std::optional<Bytes> {
    const std::string_view part = token.substr(0, token.find('.'));
    token = part.size() == token.size() ? std::string_view{} : token.substr(part.size() + 1);
    if (part.empty() || part.size() > 2 * kPayloadBytesMax) return std::nullopt;
    return from_hex(part);
  };
  auto payload = next(), signature = next();
  if (!payload || !signature || signature->size() != kSignatureBytes) return std::nullopt;
  Parts out{*std::move(payload), *std::move(signature), std::nullopt};
  if (token.empty()) return out;
  out.proof = next();
  if (!out.proof || out.proof->size() != kSignatureBytes || !token.empty()) return std::nullopt;
  return out;
}

}  // namespace

Result<SigningKey> SigningKey::of(std::shared_ptr<EVP_PKEY> key) {
  PublicKey public_key;
  std::size_t size = public_key.size();
  if (!key || EVP_PKEY_get_id(key.get()) != EVP_PKEY_ED25519 ||
      EVP_PKEY_get_raw_public_key(key.get(), reinterpret_cast<unsigned char*>(public_key.data()), &size) != 1)
    return fatal(std::format("cannot use a signing key: {}.", openssl_error_text()));
  return SigningKey(std::move(key), public_key);
}

Result<SigningKey> SigningKey::make() { return of({EVP_PKEY_Q_keygen(nullptr, nullptr, "ED25519"), EVP_PKEY_free}); }

Result<SigningKey> SigningKey::load_or_make(const std::filesystem::path& file) {
  const auto load = [&file](ByteSpan pem) -> Result<SigningKey> {
    const BioPtr bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
    auto key = of({PEM_read_bio_PrivateKey(bio.get(), nullptr, nullptr, nullptr), EVP_PKEY_free});
    if (!key) return fix_input(std::format("'{}' holds no ed25519 key; delete it to get a new one.", file.string()));
    return key;
  };
  KVASIR_ASSIGN(std::optional<Bytes> pem, read_private_file(file, kKeyFileBytesMax));
  if (pem) return load(*pem);
  KVASIR_ASSIGN(const SigningKey made, make());
  const BioPtr bio(BIO_new(BIO_s_secmem()));
  char* text = nullptr;
  if (!bio || PEM_write_bio_PKCS8PrivateKey(bio.get(), made.key_.get(), nullptr, nullptr, 0, nullptr, nullptr) != 1)
    return fatal(std::format("cannot write a signing key: {}.", openssl_error_text()));
  const long size = BIO_get_mem_data(bio.get(), &text);
  KVASIR_ASSIGN(const bool created,
                create_private_file(file, std::as_bytes(std::span(text, static_cast<std::size_t>(size)))));
  if (created) return made;
  KVASIR_ASSIGN(pem, read_private_file(file, kKeyFileBytesMax));  // another process was first
  if (!pem) return fatal(std::format("'{}' appeared and vanished; start one process at a time.", file.string()));
  return load(*pem);
}

std::array<std::byte, 64> SigningKey::sign(ByteSpan message) const {
  std::array<std::byte, 64> out;
  std::size_t size = out.size();
  const ContextPtr context(EVP_MD_CTX_new());
  // A key that was made or loaded signs; only exhausted memory could be in the way.
  KVASIR_CHECK(context && EVP_DigestSignInit(context.get(), nullptr, nullptr, nullptr, key_.get()) == 1 &&
               EVP_DigestSign(context.get(), reinterpret_cast<unsigned char*>(out.data()), &size, raw(message),
                              message.size()) == 1 &&
               size == out.size());
  return out;
}

Result<std::string> sign_grant(const Grant& grant, const SigningKey& hub) {
  for (const std::string* name : {&grant.backbone, &grant.worker, &grant.model})
    if (name->size() > kGrantNameBytesMax)
      return fix_input(std::format("names in a grant have up to {} bytes.", kGrantNameBytesMax));
  const Bytes payload = payload_of(grant);
  return std::format("{}{}.{}", kPrefix, to_hex(payload), to_hex(hub.sign(signed_bytes(kGrantContext, payload))));
}

bool is_grant(std::string_view token) { return token.starts_with(kPrefix); }

std::string prove_grant(std::string_view grant, const SigningKey& backbone, const Binding& binding) {
  const ByteSpan text = std::as_bytes(std::span(grant.data(), grant.size()));
  return std::format("{}.{}", grant, to_hex(backbone.sign(signed_bytes(kProofContext, binding, text))));
}

Result<Grant> check_grant(std::string_view token, const PublicKey& hub, std::string_view worker,
                          const Binding& binding, std::uint64_t now_unix_s) {
  const std::optional<Parts> parts = split(token);
  if (!parts || !parts->proof) return fix_input("The session grant is malformed.");
  // The signature first: nothing of a stranger's bytes is looked at before it.
  if (!verify(hub, signed_bytes(kGrantContext, parts->payload), parts->signature))
    return fix_input("The session grant is not signed by this worker's hub.");
  const std::optional<Grant> grant = parse(parts->payload);
  if (!grant) return fix_input("The session grant is malformed.");
  if (grant->worker != worker) return fix_input("The session grant is for another worker.");
  if (now_unix_s > grant->expires_unix_s + kGrantClockSkew_s)
    return fix_input("The session grant has expired; the backbone must ask its hub for another.");
  if (now_unix_s + kGrantLife_s + kGrantClockSkew_s < grant->expires_unix_s)
    return fix_input("The session grant lasts too long; is this worker's clock right?");
  const std::string_view text = token.substr(0, token.rfind('.'));
  const ByteSpan bytes = std::as_bytes(std::span(text.data(), text.size()));
  if (!verify(grant->backbone_key, signed_bytes(kProofContext, binding, bytes), *parts->proof))
    return fix_input("The session grant was made for another connection, or belongs to somebody else.");
  return *grant;
}

}  // namespace kvasir::net
