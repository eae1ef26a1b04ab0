// What the hub must remember over a restart: tokens, admitted keys, whose worker id is whose,
// bans, and the contribution ledger. The market is not here: nodes report again in seconds.
//
// Thread contract: every member may be called from any thread; calls block (a disk or a
// server), so they are made off the network threads. Every acknowledged write is durable.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace kvasir::hub {

// Seconds since 1970, UTC.
using UnixSeconds = std::int64_t;
UnixSeconds unix_now();

// A viewer may look at coverage and traffic, and change nothing.
enum class Scope { kWorker, kBackbone, kAdmin, kViewer };
std::string_view to_string(Scope scope);
std::optional<Scope> parse_scope(std::string_view text);

struct TokenRecord {
  std::string id;           // public: appears in lists and in the ledger
  std::string secret_hash;  // hex SHA-256 of the token's secret part
  Scope scope = Scope::kWorker;
  std::string note;
  UnixSeconds created = 0;
  std::optional<UnixSeconds> expires{};
  std::optional<UnixSeconds> revoked{};
  std::optional<std::int64_t> pairs_per_day{};  // of a backbone: what it may have computed; none: no limit
  friend bool operator==(const TokenRecord&, const TokenRecord&) = default;
};

struct KeyRecord {
  std::string public_key;  // hex, ed25519
  Scope scope = Scope::kWorker;
  std::string note;
  UnixSeconds created = 0;
  std::optional<UnixSeconds> revoked{};
  friend bool operator==(const KeyRecord&, const KeyRecord&) = default;
};

struct BanRecord {
  std::string worker_id;
  std::string reason;
  UnixSeconds created = 0;
  friend bool operator==(const BanRecord&, const BanRecord&) = default;
};

// Whose figures: what a backbone says it received, what a worker says it served in all and to one
// backbone (whose token id is then the reporter), or what the relay carried for the two in each
// direction. All are kept; none is corrected by another.
enum class Side { kBackbone, kWorker, kServedTo, kRelayToWorker, kRelayToBackbone };
std::string_view to_string(Side side);
Side parse_side(std::string_view text);  // of what to_string wrote

struct Contribution {
  std::int64_t day = 0;     // days since 1970, UTC
  std::string worker_id;
  std::string reporter;     // token id
  Side side = Side::kBackbone;
  std::int64_t pairs = 0, rows = 0, bytes = 0;
  friend bool operator==(const Contribution&, const Contribution&) = default;
};

class Store {
 public:
  virtual ~Store() = default;

  virtual Status put_token(const TokenRecord& token) = 0;  // the id must be new
  virtual Result<std::optional<TokenRecord>> find_token(std::string_view id) = 0;
  virtual Result<std::vector<TokenRecord>> list_tokens() = 0;  // oldest first
  // false: no such token. A token once revoked keeps its first time.
  virtual Result<bool> revoke_token(std::string_view id, UnixSeconds now) = 0;

  virtual Status put_key(const KeyRecord& key) = 0;  // replaces one of the same public key
  virtual Result<std::optional<KeyRecord>> find_key(std::string_view public_key) = 0;
  virtual Result<std::vector<KeyRecord>> list_keys() = 0;
  virtual Result<bool> revoke_key(std::string_view public_key, UnixSeconds now) = 0;

  // The owner of a worker id: the first who asked, for good.
  virtual Result<std::string> claim_worker(std::string_view worker_id, std::string_view owner, UnixSeconds now) = 0;

  // At which of several hubs a worker waits for relayed connections: the last that said so.
  virtual Status put_relay_session(std::string_view session, std::string_view hub_url, UnixSeconds now) = 0;
  virtual Result<std::optional<std::string>> find_relay_session(std::string_view session) = 0;

  virtual Status put_ban(const BanRecord& ban) = 0;
  virtual Result<bool> remove_ban(std::string_view worker_id) = 0;
  virtual Result<std::vector<BanRecord>> list_bans() = 0;

  // Adds to the sums of (day, worker, reporter, side), all or nothing. A report with an id
  // that was seen before changes nothing and gives false, so that senders may repeat it.
  virtual Result<bool> add_contributions(const std::vector<Contribution>& entries, std::string_view report_id,
                                         UnixSeconds now) = 0;
  // Days from `from` to `to`, both included, ordered by day, worker, reporter, side.
  virtual Result<std::vector<Contribution>> contributions(std::int64_t from, std::int64_t to) = 0;
  // The pairs that a backbone had computed on a day: what it says itself (Side::kBackbone), or
  // what its workers say (kServedTo) if that is more.
  virtual Result<std::int64_t> pairs_used(std::int64_t day, std::string_view reporter) = 0;

  // Drops report ids and relay sessions older than `before`.
  virtual Status prune(UnixSeconds before) = 0;
  // An error if the store's own integrity check fails.
  virtual Status check() = 0;
};

std::unique_ptr<Store> make_memory_store();

// `data_dir`/hub.db, created 0600 in a 0700 folder, WAL, migrated to the current version.
Result<std::unique_ptr<Store>> open_sqlite_store(const std::filesystem::path& data_dir);

// "postgres://user@host/database"; several hubs may use one. The text may hold a password and
// is never repeated in an error.
Result<std::unique_ptr<Store>> open_postgres_store(const std::string& url);

}  // namespace kvasir::hub
