// A worker that was slow for a while, beside others that are as fast as it is otherwise.
#pragma once

namespace kvasir::sim {

// Prints what each phase showed; false if the worker does not get its share back.
bool measure_recovery();

}  // namespace kvasir::sim
