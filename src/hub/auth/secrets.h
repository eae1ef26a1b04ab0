// Randomness, hashes and signatures of the hub, by OpenSSL.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/bytes.h"

namespace kvasir::hub {

// `n` unpredictable bytes as hexadecimal digits.
std::string random_hex(std::size_t n);
std::uint64_t random_u64();

std::string sha256_hex(std::string_view text);

// Takes the same time wherever the two differ; a different length is no secret.
bool equal_in_constant_time(std::string_view a, std::string_view b);

inline constexpr std::size_t kEd25519KeyBytes = 32;
inline constexpr std::size_t kEd25519SignatureBytes = 64;
bool verify_ed25519(ByteSpan public_key, std::string_view message, ByteSpan signature);

}  // namespace kvasir::hub
