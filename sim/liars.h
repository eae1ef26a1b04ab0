// How soon a liar is found: one of four workers corrupts 1 % of its answers.
#pragma once

namespace kvasir::sim {

// Prints a table; false if a bound did not hold.
bool measure_liars();

}  // namespace kvasir::sim
