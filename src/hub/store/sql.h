// The little of SQL that both databases understand alike: statements with $1, $2, …, values
// that are integers, text or null.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/error.h"
#include "hub/store/store.h"

namespace kvasir::hub {

using SqlValue = std::variant<std::monostate, std::int64_t, std::string>;
using SqlRow = std::vector<SqlValue>;

// One connection; not for several threads at once.
class SqlConnection {
 public:
  virtual ~SqlConnection() = default;
  // Constant statements only: values never become part of the text.
  virtual Result<std::vector<SqlRow>> run(std::string_view statement, const SqlRow& values) = 0;
  // Runs `work` in a transaction that is committed, durable, when it gives no error.
  virtual Status transaction(const std::function<Status()>& work) = 0;
  // Inside a transaction: nobody else migrates until it ends.
  virtual Status lock_schema() = 0;
  virtual Status check() = 0;
};

// Migrates the schema and keeps the store's tables there.
Result<std::unique_ptr<Store>> make_sql_store(std::unique_ptr<SqlConnection> connection);

}  // namespace kvasir::hub
