#include "hub/auth/tokens.h"

#include <algorithm>
#include <format>

#include "hub/auth/secrets.h"

namespace kvasir::hub {
namespace {

constexpr std::string_view kPrefix = "kvasir_";
constexpr std::size_t kIdDigits = 16;
constexpr std::size_t kSecretDigits = 64;

constexpr std::string_view kUnknown = "this token is not known here; ask the hub's operator for one.";

struct Parts {
  std::string_view id, secret;
};

std::optional<Parts> split(std::string_view token) {
  if (token.size() != kPrefix.size() + kIdDigits + 1 + kSecretDigits || !token.starts_with(kPrefix))
    return std::nullopt;
  const Parts parts{token.substr(kPrefix.size(), kIdDigits), token.substr(kPrefix.size() + kIdDigits + 1)};
  if (token[kPrefix.size() + kIdDigits] != '_') return std::nullopt;
  const auto is_digit = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  if (!std::ranges::all_of(parts.id, is_digit) || !std::ranges::all_of(parts.secret, is_digit)) return std::nullopt;
  return parts;
}

}  // namespace

NewToken make_token(Scope scope, std::string note, std::optional<UnixSeconds> expires, UnixSeconds now) {
  const std::string secret = random_hex(kSecretDigits / 2);
  NewToken out;
  out.record.id = random_hex(kIdDigits / 2);
  out.record.secret_hash = sha256_hex(secret);
  out.record.scope = scope;
  out.record.note = std::move(note);
  out.record.created = now;
  out.record.expires = expires;
  out.text = std::format("{}{}_{}", kPrefix, out.record.id, secret);
  return out;
}

Result<Principal> Authenticator::check(std::string_view token, UnixSeconds unix_time, TimePoint now) {
  const auto parts = split(token);
  if (!parts) return fix_input(std::string(kUnknown));
  const std::string id(parts->id);
  std::optional<TokenRecord> record;
  {
    const MutexLock lock(mutex_);
    const auto cached = cache_.find(id);
    if (cached != cache_.end() && now - cached->second.read < kTokenCacheTtl) record = cached->second.record;
  }
  if (!record) {
    KVASIR_ASSIGN(record, store_.find_token(id));
    const MutexLock lock(mutex_);
    if (!record) {
      cache_.erase(id);
    } else {
      if (cache_.size() >= kTokenCacheMax) cache_.clear();
      cache_[id] = {*record, now};
    }
  }
  // An unknown id takes the same comparison as a known one.
  static const std::string kNobody(kSecretDigits, '0');
  const bool right = equal_in_constant_time(sha256_hex(parts->secret), record ? record->secret_hash : kNobody);
  if (!record || !right) return fix_input(std::string(kUnknown));
  if (record->revoked) return fix_input("this token was revoked; ask the hub's operator for a new one.");
  if (record->expires && *record->expires <= unix_time)
    return fix_input("this token has expired; ask the hub's operator for a new one.");
  return Principal{record->id, record->scope, record->pairs_per_day};
}

}  // namespace kvasir::hub
