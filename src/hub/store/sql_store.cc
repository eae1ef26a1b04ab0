// The store over any SQL connection.

#include <format>

#include "base/mutex.h"
#include "hub/store/sql.h"

namespace kvasir::hub {
namespace {

// Each entry brings the schema from version i to i + 1; entries are never changed, only added.
const std::vector<std::vector<const char*>> kMigrations = {
    {
        "CREATE TABLE tokens (id TEXT PRIMARY KEY, secret_hash TEXT NOT NULL, scope TEXT NOT NULL, note TEXT NOT NULL, "
        "created BIGINT NOT NULL, expires BIGINT, revoked BIGINT, position BIGINT NOT NULL)",
        "CREATE TABLE keys (public_key TEXT PRIMARY KEY, scope TEXT NOT NULL, note TEXT NOT NULL, created BIGINT NOT "
        "NULL, "
        "revoked BIGINT)",
        "CREATE TABLE workers (worker_id TEXT PRIMARY KEY, owner TEXT NOT NULL, first_seen BIGINT NOT NULL)",
        "CREATE TABLE bans (worker_id TEXT PRIMARY KEY, reason TEXT NOT NULL, created BIGINT NOT NULL)",
        "CREATE TABLE contributions (day BIGINT NOT NULL, worker_id TEXT NOT NULL, reporter TEXT NOT NULL, side TEXT "
        "NOT NULL, "
        "pairs BIGINT NOT NULL, row_count BIGINT NOT NULL, bytes BIGINT NOT NULL, PRIMARY KEY (day, worker_id, "
        "reporter, side))",
        "CREATE TABLE reports (report_id TEXT PRIMARY KEY, received BIGINT NOT NULL)",
    },
    {
        "ALTER TABLE tokens ADD COLUMN pairs_per_day BIGINT",
    },
    {
        "CREATE TABLE relay_sessions (session TEXT PRIMARY KEY, hub_url TEXT NOT NULL, seen BIGINT NOT NULL)",
    },
};

std::int64_t integer(const SqlValue& value) {
  const auto* number = std::get_if<std::int64_t>(&value);
  return number == nullptr ? 0 : *number;
}
std::string text(const SqlValue& value) {
  const auto* characters = std::get_if<std::string>(&value);
  return characters == nullptr ? std::string() : *characters;
}
std::optional<UnixSeconds> maybe(const SqlValue& value) {
  const auto* number = std::get_if<std::int64_t>(&value);
  return number == nullptr ? std::nullopt : std::optional(*number);
}
SqlValue value_of(std::optional<UnixSeconds> time) { return time ? SqlValue(*time) : SqlValue(); }
SqlValue value_of(std::string_view characters) { return std::string(characters); }

class SqlStore final : public Store {
 public:
  explicit SqlStore(std::unique_ptr<SqlConnection> connection) : connection_(std::move(connection)) {}

  Status migrate() {
    const MutexLock lock(mutex_);
    return connection_->transaction([this]() KVASIR_REQUIRES(mutex_) -> Status {
      KVASIR_TRY(connection_->lock_schema());
      KVASIR_TRY(run("CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)", {}));
      KVASIR_ASSIGN(const auto rows, run("SELECT COALESCE(MAX(version), 0) FROM schema_version", {}));
      const auto version = static_cast<std::size_t>(integer(rows.at(0).at(0)));
      if (version > kMigrations.size())
        return fix_input(std::format("the database is of version {}, this program knows {}; use a newer kvasir-hub.",
                                     version, kMigrations.size()));
      for (std::size_t i = version; i < kMigrations.size(); ++i) {
        for (const char* statement : kMigrations[i]) KVASIR_TRY(run(statement, {}));
        KVASIR_TRY(run("INSERT INTO schema_version VALUES ($1)", {static_cast<std::int64_t>(i + 1)}));
      }
      return {};
    });
  }

  Status put_token(const TokenRecord& t) override {
    const MutexLock lock(mutex_);
    return connection_->transaction([&]() KVASIR_REQUIRES(mutex_) -> Status {
      KVASIR_TRY(run(
          "INSERT INTO tokens VALUES ($1, $2, $3, $4, $5, $6, $7, (SELECT COALESCE(MAX(position), 0) + 1 FROM tokens), "
          "$8)",
          {t.id, t.secret_hash, value_of(to_string(t.scope)), t.note, t.created, value_of(t.expires),
           value_of(t.revoked), value_of(t.pairs_per_day)}));
      return {};
    });
  }
  Result<std::optional<TokenRecord>> find_token(std::string_view id) override {
    const MutexLock lock(mutex_);
    KVASIR_ASSIGN(const auto rows, run(std::string(kSelectToken) + " WHERE id = $1", {value_of(id)}));
    if (rows.empty()) return std::nullopt;
    return to_token(rows[0]);
  }
  Result<std::vector<TokenRecord>> list_tokens() override {
    const MutexLock lock(mutex_);
    KVASIR_ASSIGN(const auto rows, run(std::string(kSelectToken) + " ORDER BY position", {}));
    std::vector<TokenRecord> out;
    for (const SqlRow& row : rows) out.push_back(to_token(row));
    return out;
  }
  Result<bool> revoke_token(std::string_view id, UnixSeconds now) override {
    return changed("UPDATE tokens SET revoked = COALESCE(revoked, $2) WHERE id = $1 RETURNING id", {value_of(id), now});
  }

  Status put_key(const KeyRecord& k) override {
    const MutexLock lock(mutex_);
    KVASIR_TRY(run(
        "INSERT INTO keys VALUES ($1, $2, $3, $4, $5) ON CONFLICT (public_key) DO UPDATE SET scope = excluded.scope, "
        "note = excluded.note, created = excluded.created, revoked = excluded.revoked",
        {k.public_key, value_of(to_string(k.scope)), k.note, k.created, value_of(k.revoked)}));
    return {};
  }
  Result<std::optional<KeyRecord>> find_key(std::string_view public_key) override {
    const MutexLock lock(mutex_);
    KVASIR_ASSIGN(const auto rows, run(std::string(kSelectKey) + " WHERE public_key = $1", {value_of(public_key)}));
    if (rows.empty()) return std::nullopt;
    return to_key(rows[0]);
  }
  Result<std::vector<KeyRecord>> list_keys() override {
    const MutexLock lock(mutex_);
    KVASIR_ASSIGN(const auto rows, run(std::string(kSelectKey) + " ORDER BY public_key", {}));
    std::vector<KeyRecord> out;
    for (const SqlRow& row : rows) out.push_back(to_key(row));
    return out;
  }
  Result<bool> revoke_key(std::string_view public_key, UnixSeconds now) override {
    return changed("UPDATE keys SET revoked = COALESCE(revoked, $2) WHERE public_key = $1 RETURNING public_key",
                   {value_of(public_key), now});
  }

  Result<std::string> claim_worker(std::string_view worker_id, std::string_view owner, UnixSeconds now) override {
    const MutexLock lock(mutex_);
    KVASIR_TRY(run("INSERT INTO workers VALUES ($1, $2, $3) ON CONFLICT (worker_id) DO NOTHING",
                   {value_of(worker_id), value_of(owner), now}));
    KVASIR_ASSIGN(const auto rows, run("SELECT owner FROM workers WHERE worker_id = $1", {value_of(worker_id)}));
    return rows.empty() ? std::string(owner) : text(rows[0][0]);
  }

  Status put_relay_session(std::string_view session, std::string_view hub_url, UnixSeconds now) override {
    const MutexLock lock(mutex_);
    KVASIR_TRY(run("INSERT INTO relay_sessions VALUES ($1, $2, $3) ON CONFLICT (session) DO UPDATE SET hub_url = excluded.hub_url, "
                   "seen = excluded.seen",
                   {value_of(session), value_of(hub_url), now}));
    return {};
  }
  Result<std::optional<std::string>> find_relay_session(std::string_view session) override {
    const MutexLock lock(mutex_);
    KVASIR_ASSIGN(const auto rows, run("SELECT hub_url FROM relay_sessions WHERE session = $1", {value_of(session)}));
    return rows.empty() ? std::nullopt : std::optional(text(rows[0].at(0)));
  }

  Status put_ban(const BanRecord& ban) override {
    const MutexLock lock(mutex_);
    KVASIR_TRY(
        run("INSERT INTO bans VALUES ($1, $2, $3) ON CONFLICT (worker_id) DO UPDATE SET reason = excluded.reason, "
            "created = excluded.created",
            {ban.worker_id, ban.reason, ban.created}));
    return {};
  }
  Result<bool> remove_ban(std::string_view worker_id) override {
    return changed("DELETE FROM bans WHERE worker_id = $1 RETURNING worker_id", {value_of(worker_id)});
  }
  Result<std::vector<BanRecord>> list_bans() override {
    const MutexLock lock(mutex_);
    KVASIR_ASSIGN(const auto rows, run("SELECT worker_id, reason, created FROM bans ORDER BY worker_id", {}));
    std::vector<BanRecord> out;
    for (const SqlRow& row : rows) out.push_back({text(row[0]), text(row[1]), integer(row[2])});
    return out;
  }

  Result<bool> add_contributions(const std::vector<Contribution>& entries, std::string_view report_id,
                                 UnixSeconds now) override {
    const MutexLock lock(mutex_);
    bool fresh = true;
    const Status added = connection_->transaction([&]() KVASIR_REQUIRES(mutex_) -> Status {
      if (!report_id.empty()) {
        KVASIR_ASSIGN(const auto rows,
                      run("INSERT INTO reports VALUES ($1, $2) ON CONFLICT (report_id) DO NOTHING RETURNING report_id",
                          {value_of(report_id), now}));
        fresh = !rows.empty();
        if (!fresh) return {};
      }
      for (const Contribution& c : entries)
        KVASIR_TRY(
            run("INSERT INTO contributions VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT (day, worker_id, reporter, "
                "side) "
                "DO UPDATE SET pairs = contributions.pairs + excluded.pairs, row_count = contributions.row_count + "
                "excluded.row_count, bytes = contributions.bytes + excluded.bytes",
                {c.day, c.worker_id, c.reporter, value_of(to_string(c.side)), c.pairs, c.rows, c.bytes}));
      return {};
    });
    KVASIR_TRY(added);
    return fresh;
  }
  Result<std::vector<Contribution>> contributions(std::int64_t from, std::int64_t to) override {
    const MutexLock lock(mutex_);
    KVASIR_ASSIGN(const auto rows,
                  run("SELECT day, worker_id, reporter, side, pairs, row_count, bytes FROM contributions "
                      "WHERE day BETWEEN $1 AND $2 ORDER BY day, worker_id, reporter, side",
                      {from, to}));
    std::vector<Contribution> out;
    for (const SqlRow& r : rows)
      out.push_back({integer(r[0]), text(r[1]), text(r[2]),
                     parse_side(text(r[3])), integer(r[4]),
                     integer(r[5]), integer(r[6])});
    return out;
  }

  Result<std::int64_t> pairs_used(std::int64_t day, std::string_view reporter) override {
    const MutexLock lock(mutex_);
    KVASIR_ASSIGN(const auto rows,
                  run("SELECT CAST(COALESCE(SUM(pairs), 0) AS BIGINT) FROM contributions WHERE day = $1 AND reporter = $2 "
                      "AND side IN ($3, $4) GROUP BY side",
                      {day, value_of(reporter), value_of(to_string(Side::kBackbone)), value_of(to_string(Side::kServedTo))}));
    std::int64_t most = 0;
    for (const SqlRow& row : rows) most = std::max(most, integer(row.at(0)));
    return most;
  }

  Status prune(UnixSeconds before) override {
    const MutexLock lock(mutex_);
    KVASIR_TRY(run("DELETE FROM reports WHERE received < $1", {before}));
    KVASIR_TRY(run("DELETE FROM relay_sessions WHERE seen < $1", {before}));
    return {};
  }
  Status check() override {
    const MutexLock lock(mutex_);
    return connection_->check();
  }

 private:
  static constexpr std::string_view kSelectToken =
      "SELECT id, secret_hash, scope, note, created, expires, revoked, pairs_per_day FROM tokens";
  static constexpr std::string_view kSelectKey = "SELECT public_key, scope, note, created, revoked FROM keys";

  Result<std::vector<SqlRow>> run(std::string_view statement, const SqlRow& values) KVASIR_REQUIRES(mutex_) {
    return connection_->run(statement, values);
  }
  Result<bool> changed(std::string_view statement, const SqlRow& values) {
    const MutexLock lock(mutex_);
    KVASIR_ASSIGN(const auto rows, run(statement, values));
    return !rows.empty();
  }
  // A scope this version does not know gives no rights: the record reads as revoked.
  static TokenRecord to_token(const SqlRow& row) {
    const auto scope = parse_scope(text(row[2]));
    TokenRecord out{text(row[0]),  text(row[1]), scope.value_or(Scope::kWorker), text(row[3]), integer(row[4]),
                    maybe(row[5]), maybe(row[6]), maybe(row[7])};
    if (!scope) out.revoked = 0;
    return out;
  }
  static KeyRecord to_key(const SqlRow& row) {
    const auto scope = parse_scope(text(row[1]));
    KeyRecord out{text(row[0]), scope.value_or(Scope::kWorker), text(row[2]), integer(row[3]), maybe(row[4])};
    if (!scope) out.revoked = 0;
    return out;
  }

  Mutex mutex_;
  std::unique_ptr<SqlConnection> connection_ KVASIR_GUARDED_BY(mutex_);
};

}  // namespace

Result<std::unique_ptr<Store>> make_sql_store(std::unique_ptr<SqlConnection> connection) {
  auto store = std::make_unique<SqlStore>(std::move(connection));
  KVASIR_TRY(store->migrate());
  return store;
}

}  // namespace kvasir::hub
