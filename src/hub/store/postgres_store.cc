#include <format>
#include <pqxx/pqxx>

#include "hub/store/sql.h"

namespace kvasir::hub {
namespace {

// Any number will do that nobody else uses on this database.
constexpr std::string_view kMigrationLock = "SELECT pg_advisory_xact_lock(7022371)";

class PostgresConnection final : public SqlConnection {
 public:
  explicit PostgresConnection(std::string url) : url_(std::move(url)) {}

  Status connect() {
    return guarded([&]() -> Status {
      transaction_.reset();
      connection_.reset();
      connection_ = std::make_unique<pqxx::connection>(url_);
      lost_ = false;
      return {};
    });
  }

  Result<std::vector<SqlRow>> run(std::string_view statement, const SqlRow& values) override {
    std::vector<SqlRow> rows;
    if (transaction_) {
      const Status ran = guarded([&]() -> Status {
        rows = collect(*transaction_, statement, values);
        return {};
      });
      KVASIR_TRY(ran);
      return rows;
    }
    const Status ran = transaction([&]() -> Status {
      KVASIR_ASSIGN(rows, run(statement, values));
      return {};
    });
    KVASIR_TRY(ran);
    return rows;
  }

  Status transaction(const std::function<Status()>& work) override {
    Status done = attempt(work);
    // A server that restarted: nothing of this transaction has happened, so it may run again.
    if (!done && lost_ && !committing_) done = attempt(work);
    return done;
  }

  Status lock_schema() override {
    KVASIR_TRY(run(kMigrationLock, {}));
    return {};
  }

  Status check() override {
    KVASIR_TRY(run("SELECT 1", {}));
    return {};
  }

 private:
  Status attempt(const std::function<Status()>& work) {
    committing_ = false;
    if (connection_ == nullptr || lost_) KVASIR_TRY(connect());
    const Status done = guarded([&]() -> Status {
      transaction_ = std::make_unique<pqxx::work>(*connection_);
      KVASIR_TRY(work());
      committing_ = true;
      transaction_->commit();
      return {};
    });
    // Its destructor rolls back what was not committed, and must not throw through us.
    (void)guarded([&]() -> Status {
      transaction_.reset();
      return {};
    });
    return done;
  }

  static std::vector<SqlRow> collect(pqxx::work& tx, std::string_view statement, const SqlRow& values) {
    pqxx::params params;
    for (const SqlValue& value : values) {
      if (const auto* number = std::get_if<std::int64_t>(&value)) {
        params.append(*number);
      } else if (const auto* characters = std::get_if<std::string>(&value)) {
        params.append(*characters);
      } else {
        params.append();
      }
    }
    const pqxx::result result = tx.exec(statement, params);
    std::vector<SqlRow> rows;
    for (const auto& row : result) {
      SqlRow out;
      for (const auto& field : row) {
        if (field.is_null()) {
          out.emplace_back();
        } else if (result.column_type(field.column_number()) == kInt8 ||
                   result.column_type(field.column_number()) == kInt4) {
          out.emplace_back(field.as<std::int64_t>());
        } else {
          out.emplace_back(field.as<std::string>());
        }
      }
      rows.push_back(std::move(out));
    }
    return rows;
  }

  // libpqxx throws; the store does not. Its messages can quote the connection string, so only
  // the server's own words about a statement are passed on.
  template <typename Work>
  Status guarded(const Work& work) {
    try {
      return work();
    } catch (const pqxx::broken_connection&) {
      lost_ = true;
      return retry_later("the PostgreSQL server does not answer; check that it runs and that --store names it.");
    } catch (const pqxx::sql_error& error) {
      return fatal(std::format("PostgreSQL refused a statement (SQLSTATE {}).", std::string(error.sqlstate())));
    } catch (const std::exception&) {
      return fatal("the PostgreSQL client library reported an unexpected error.");
    }
  }

  static constexpr pqxx::oid kInt8 = 20, kInt4 = 23;  // pg_type, fixed by PostgreSQL

  std::string url_;
  std::unique_ptr<pqxx::connection> connection_;
  std::unique_ptr<pqxx::work> transaction_;
  bool committing_ = false;  // the last attempt got that far: whether it happened is not known
  bool lost_ = false;        // the connection is of no use any more
};

}  // namespace

Result<std::unique_ptr<Store>> open_postgres_store(const std::string& url) {
  auto connection = std::make_unique<PostgresConnection>(url);
  KVASIR_TRY(connection->connect());
  return make_sql_store(std::move(connection));
}

}  // namespace kvasir::hub
