#include <fcntl.h>
#include <sqlite3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <format>
#include <unordered_map>

#include "hub/store/private_folder.h"
#include "hub/store/sql.h"

namespace kvasir::hub {
namespace {

constexpr int kBusyTimeoutMs = 10'000;  // `token create` while the hub runs

struct CloseDatabase {
  void operator()(sqlite3* db) const { sqlite3_close_v2(db); }
};
struct FinalizeStatement {
  void operator()(sqlite3_stmt* statement) const { sqlite3_finalize(statement); }
};
using Statement = std::unique_ptr<sqlite3_stmt, FinalizeStatement>;

class SqliteConnection final : public SqlConnection {
 public:
  SqliteConnection(std::unique_ptr<sqlite3, CloseDatabase> db, std::string path)
      : db_(std::move(db)), path_(std::move(path)) {}

  Result<std::vector<SqlRow>> run(std::string_view text, const SqlRow& values) override {
    KVASIR_ASSIGN(sqlite3_stmt* const statement, prepared(text));
    struct Reset {
      sqlite3_stmt* s;
      ~Reset() {
        sqlite3_reset(s);
        sqlite3_clear_bindings(s);
      }
    } const reset{statement};
    for (std::size_t i = 0; i < values.size(); ++i) {
      const int index = sqlite3_bind_parameter_index(statement, std::format("${}", i + 1).c_str());
      int code = SQLITE_OK;
      if (const auto* number = std::get_if<std::int64_t>(&values[i])) {
        code = sqlite3_bind_int64(statement, index, *number);
      } else if (const auto* characters = std::get_if<std::string>(&values[i])) {
        code = sqlite3_bind_text64(statement, index, characters->data(), characters->size(), SQLITE_TRANSIENT,
                                   SQLITE_UTF8);
      }
      if (code != SQLITE_OK) return failed();
    }
    std::vector<SqlRow> rows;
    int code;
    while ((code = sqlite3_step(statement)) == SQLITE_ROW) {
      SqlRow row;
      for (int c = 0; c < sqlite3_column_count(statement); ++c) {
        switch (sqlite3_column_type(statement, c)) {
          case SQLITE_NULL: row.emplace_back(); break;
          case SQLITE_INTEGER: row.emplace_back(std::int64_t{sqlite3_column_int64(statement, c)}); break;
          default: {
            const auto* bytes = static_cast<const char*>(sqlite3_column_blob(statement, c));  // null if empty
            row.emplace_back(bytes == nullptr
                                 ? std::string()
                                 : std::string(bytes, static_cast<std::size_t>(sqlite3_column_bytes(statement, c))));
          }
        }
      }
      rows.push_back(std::move(row));
    }
    if (code != SQLITE_DONE) return failed();
    return rows;
  }

  Status transaction(const std::function<Status()>& work) override {
    KVASIR_TRY(run("BEGIN IMMEDIATE", {}));
    if (const Status done = work(); !done) {
      (void)run("ROLLBACK", {});
      return done;
    }
    const auto committed = run("COMMIT", {});
    if (!committed) {
      (void)run("ROLLBACK", {});
      return std::unexpected(committed.error());
    }
    return {};
  }

  Status lock_schema() override { return {}; }  // BEGIN IMMEDIATE has the database

  Status check() override {
    KVASIR_ASSIGN(const auto rows, run("PRAGMA integrity_check", {}));
    if (rows.size() == 1 && rows[0].at(0) == SqlValue(std::string("ok"))) return {};
    return fatal(std::format("'{}' is damaged; restore it from a backup.", path_));
  }

 private:
  Result<sqlite3_stmt*> prepared(std::string_view text) {
    const auto found = statements_.find(std::string(text));
    if (found != statements_.end()) return found->second.get();
    sqlite3_stmt* raw = nullptr;
    if (sqlite3_prepare_v3(db_.get(), text.data(), static_cast<int>(text.size()), SQLITE_PREPARE_PERSISTENT, &raw,
                           nullptr) != SQLITE_OK)
      return failed();
    return statements_.emplace(std::string(text), Statement(raw)).first->second.get();
  }

  std::unexpected<Error> failed() const {
    const int code = sqlite3_errcode(db_.get());
    const std::string message = std::format("the database '{}' reports: {}.", path_, sqlite3_errmsg(db_.get()));
    return code == SQLITE_BUSY || code == SQLITE_FULL ? retry_later(message) : fatal(message);
  }

  std::unique_ptr<sqlite3, CloseDatabase> db_;
  std::string path_;
  std::unordered_map<std::string, Statement> statements_;  // gone before db_: declared after it
};

}  // namespace

Result<std::unique_ptr<Store>> open_sqlite_store(const std::filesystem::path& data_dir) {
  KVASIR_TRY(make_private_folder(data_dir));
  const std::string path = (data_dir / "hub.db").string();
  // The file exists with the right mode before SQLite opens it; its WAL and shared memory
  // files take the same mode.
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return fix_input(std::format("cannot open '{}': {}; check the data folder.", path, errno_text(errno)));
  ::fchmod(fd, 0600);
  ::close(fd);

  sqlite3* raw = nullptr;
  const int code = sqlite3_open_v2(path.c_str(), &raw, SQLITE_OPEN_READWRITE | SQLITE_OPEN_FULLMUTEX, nullptr);
  std::unique_ptr<sqlite3, CloseDatabase> db(raw);
  if (code != SQLITE_OK) return fatal(std::format("cannot open the database '{}': {}.", path, sqlite3_errstr(code)));
  sqlite3_extended_result_codes(raw, 0);
  sqlite3_busy_timeout(raw, kBusyTimeoutMs);
  auto connection = std::make_unique<SqliteConnection>(std::move(db), path);
  for (const char* pragma : {"PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL", "PRAGMA trusted_schema = OFF"})
    KVASIR_TRY(connection->run(pragma, {}));
  return make_sql_store(std::move(connection));
}

}  // namespace kvasir::hub
