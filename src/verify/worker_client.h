// A worker as a subject: one connection, one request at a time, every wait bounded.
#pragma once

#include <memory>
#include <string>

#include "dispatch/dispatcher.h"
#include "verify/subject.h"

namespace kvasir::verify {

struct WorkerClientOptions {
  std::string token;
  wire::NumericsId numerics_id;                   // of this process
  Nanos answer_wait = std::chrono::seconds(120);  // for one request
  bool fast = false;                              // ask for fast numerics at once…
  wire::RowType row_type = wire::RowType::kF32;   // …and for rows in this type, both ways
};

class WorkerClient : public Subject {
 public:
  // Asks for exact numerics, and for fast where the worker's build is another one; `why_fast`
  // then says what differs.
  static Result<std::unique_ptr<WorkerClient>> connect(const dispatch::WorkerAddress& where, const WorkerClientOptions& options);

  virtual const wire::Holdings& holdings() const = 0;
  virtual const std::string& why_fast() const = 0;
};

}  // namespace kvasir::verify
