// Session grants: the hub's signed word, good for minutes, that one backbone may use one worker.
//
// The hub signs (ed25519) who may use whom, for which model, until when, and the backbone's own
// public key. The backbone shows it with a signature of its own over 32 bytes that only the two
// ends of the TLS connection know. So a grant that somebody copied is worth nothing: on another
// connection the second signature is wrong, and nobody else can make a right one.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "base/error.h"

struct evp_pkey_st;

namespace kvasir::net {

using PublicKey = std::array<std::byte, 32>;
using Binding = std::array<std::byte, 32>;  // TlsState::binding

inline constexpr std::uint64_t kGrantLife_s = 600;
// Between the clocks of the hub and a worker.
inline constexpr std::uint64_t kGrantClockSkew_s = 120;
inline constexpr std::size_t kGrantNameBytesMax = 96;  // of each name in it: the token fits a text of HELLO

class SigningKey {
 public:
  static Result<SigningKey> make();
  // A PEM file that only its owner can read (0600), made at the first call.
  static Result<SigningKey> load_or_make(const std::filesystem::path& file);
  const PublicKey& public_key() const { return public_key_; }
  std::array<std::byte, 64> sign(ByteSpan message) const;

 private:
  SigningKey(std::shared_ptr<evp_pkey_st> key, const PublicKey& public_key)
      : key_(std::move(key)), public_key_(public_key) {}
  static Result<SigningKey> of(std::shared_ptr<evp_pkey_st> key);
  std::shared_ptr<evp_pkey_st> key_;
  PublicKey public_key_;
};

struct Grant {
  std::string backbone;  // its token's id
  std::string worker;    // its worker id
  std::string model;
  std::uint64_t expires_unix_s = 0;
  PublicKey backbone_key{};
  friend bool operator==(const Grant&, const Grant&) = default;
};

// The hub's part. kFixInput: a name is too long.
Result<std::string> sign_grant(const Grant& grant, const SigningKey& hub);
// Made by sign_grant, with or without a proof?
bool is_grant(std::string_view token);
// The backbone's part: the token of a HELLO on the connection with that binding.
std::string prove_grant(std::string_view grant, const SigningKey& backbone, const Binding& binding);
// The worker's part. The error says in a sentence why not; it repeats nothing of the token.
Result<Grant> check_grant(std::string_view token, const PublicKey& hub, std::string_view worker,
                          const Binding& binding, std::uint64_t now_unix_s);

}  // namespace kvasir::net
