#include "hub/auth/secrets.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>

#include <array>
#include <memory>

#include "base/check.h"
#include "base/hex.h"

namespace kvasir::hub {
namespace {

void fill_random(std::span<std::byte> out) {
  // Fails only where the system gives no randomness at all: nothing safe can go on there.
  KVASIR_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(out.data()), static_cast<int>(out.size())) == 1);
}

}  // namespace

std::string random_hex(std::size_t n) {
  Bytes bytes(n);
  fill_random(bytes);
  return to_hex(bytes);
}

std::uint64_t random_u64() {
  std::array<std::byte, sizeof(std::uint64_t)> bytes;
  fill_random(bytes);
  return load_le<std::uint64_t>(bytes.data());
}

std::string sha256_hex(std::string_view text) {
  std::array<std::byte, 32> digest;
  unsigned size = 0;
  KVASIR_CHECK(EVP_Digest(text.data(), text.size(), reinterpret_cast<unsigned char*>(digest.data()), &size,
                          EVP_sha256(), nullptr) == 1 &&
               size == digest.size());
  return to_hex(digest);
}

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

bool verify_ed25519(ByteSpan public_key, std::string_view message, ByteSpan signature) {
  if (public_key.size() != kEd25519KeyBytes || signature.size() != kEd25519SignatureBytes) return false;
  const auto bytes = [](ByteSpan span) { return reinterpret_cast<const unsigned char*>(span.data()); };
  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(
      EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, bytes(public_key), public_key.size()), &EVP_PKEY_free);
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  if (!key || !context || EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key.get()) != 1) return false;
  return EVP_DigestVerify(context.get(), bytes(signature), signature.size(),
                          reinterpret_cast<const unsigned char*>(message.data()), message.size()) == 1;
}

}  // namespace kvasir::hub
