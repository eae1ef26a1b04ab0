// Node tokens: "kvasir_<id>_<secret>". The id is public and finds the record; the secret is
// 256 random bits, kept nowhere but with its holder: the store has its SHA-256.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/clock.h"
#include "base/error.h"
#include "base/mutex.h"
#include "hub/store/store.h"

namespace kvasir::hub {

struct NewToken {
  std::string text;  // shown once, never stored or logged
  TokenRecord record;
};
NewToken make_token(Scope scope, std::string note, std::optional<UnixSeconds> expires, UnixSeconds now);

// Who is asking.
struct Principal {
  std::string token_id;
  Scope scope = Scope::kWorker;
  std::optional<std::int64_t> pairs_per_day{};
};

// Whether `scope` may do what `needed` is needed for: an admin everything, the others their own.
constexpr bool permits(Scope scope, Scope needed) { return scope == Scope::kAdmin || scope == needed; }

// Checks tokens against the store. A record is trusted for kTokenCacheTtl, so that heartbeats
// cost no query each; a revocation made by another process takes as long to act.
inline constexpr Nanos kTokenCacheTtl = std::chrono::seconds(2);
inline constexpr std::size_t kTokenCacheMax = 65'536;

class Authenticator {
 public:
  explicit Authenticator(Store& store) : store_(store) {}

  // Blocks on the store. kFixInput: the token is malformed, unknown, wrong, expired or revoked,
  // and the sentence says which of the last two; any other error is the store's.
  Result<Principal> check(std::string_view token, UnixSeconds unix_time, TimePoint now);
  std::size_t cached() {
    const MutexLock lock(mutex_);
    return cache_.size();
  }

 private:
  struct Cached {
    TokenRecord record;
    TimePoint read;
  };
  Store& store_;
  Mutex mutex_;
  std::unordered_map<std::string, Cached> cache_ KVASIR_GUARDED_BY(mutex_);
};

}  // namespace kvasir::hub
