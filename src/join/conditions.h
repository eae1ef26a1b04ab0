// When a volunteer's machine may work: on the mains, when its owner leaves it idle, at night.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "base/error.h"

namespace kvasir::join {

struct Hours {  // minutes after local midnight; from > to spans midnight
  int from = 0, to = 0;
  bool contains(int minute) const { return from <= to ? from <= minute && minute < to : minute >= from || minute < to; }
};
// "22:00-07:00"
Result<Hours> parse_hours(const std::string& text);

struct Conditions {
  bool only_on_ac = false;
  std::optional<double> load_max;  // the machine's one-minute load, without this process
  std::optional<Hours> schedule;
};

struct MachineState {
  std::optional<bool> on_ac;  // nullopt: no battery, or not known
  double load = 0;
  int minute_of_day = 0;
};
// `sys` is /sys/class/power_supply; own_load is what this process itself adds.
MachineState look_at_machine(const std::filesystem::path& sys = "/sys/class/power_supply");

// Why the node should pause, or nothing. `paused` makes it slower to come back than to go:
// the load must have fallen well below the limit.
std::optional<std::string> reason_to_pause(const Conditions& conditions, const MachineState& state, bool paused,
                                           double own_load);

}  // namespace kvasir::join
