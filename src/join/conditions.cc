#include "join/conditions.h"

#include <charconv>
#include <cstdlib>
#include <ctime>
#include <format>
#include <fstream>

namespace kvasir::join {
namespace {

constexpr double kComeBackShare = 0.7;  // of the load limit

std::string read_word(const std::filesystem::path& path) {
  std::ifstream in(path);
  std::string word;
  in >> word;
  return word;
}

std::optional<int> parse_clock(std::string_view text) {
  int hour = 0, minute = 0;
  if (text.size() != 5 || text[2] != ':') return std::nullopt;
  if (std::from_chars(text.data(), text.data() + 2, hour).ptr != text.data() + 2) return std::nullopt;
  if (std::from_chars(text.data() + 3, text.data() + 5, minute).ptr != text.data() + 5) return std::nullopt;
  if (hour < 0 || hour > 23 || minute < 0 || minute > 59) return std::nullopt;
  return hour * 60 + minute;
}

}  // namespace

Result<Hours> parse_hours(const std::string& text) {
  const auto from = parse_clock(std::string_view(text).substr(0, 5));
  const auto to = text.size() == 11 && text[5] == '-' ? parse_clock(std::string_view(text).substr(6)) : std::nullopt;
  if (!from || !to || *from == *to)
    return fix_input(std::format("'{}' is no span of hours; write it as 22:00-07:00.", text));
  return Hours{*from, *to};
}

MachineState look_at_machine(const std::filesystem::path& sys) {
  MachineState state;
  std::error_code error;
  bool battery = false;
  for (const auto& supply : std::filesystem::directory_iterator(sys, error)) {
    const std::string type = read_word(supply.path() / "type");
    if (type == "Mains" || type == "USB") {
      if (read_word(supply.path() / "online") == "1") state.on_ac = true;
    } else if (type == "Battery" && read_word(supply.path() / "scope") != "Device") {
      battery = true;
      if (read_word(supply.path() / "status") == "Discharging" && !state.on_ac) state.on_ac = false;
    }
  }
  if (!battery) state.on_ac.reset();
  double loads[1] = {0};
  if (::getloadavg(loads, 1) == 1) state.load = loads[0];
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  state.minute_of_day = local.tm_hour * 60 + local.tm_min;
  return state;
}

std::optional<std::string> reason_to_pause(const Conditions& conditions, const MachineState& state, bool paused,
                                           double own_load) {
  if (conditions.schedule && !conditions.schedule->contains(state.minute_of_day))
    return "it is outside the hours of --schedule";
  if (conditions.only_on_ac && state.on_ac == false) return "the machine runs on its battery";
  if (conditions.load_max) {
    const double others = std::max(0.0, state.load - own_load);
    const double limit = paused ? *conditions.load_max * kComeBackShare : *conditions.load_max;
    if (others > limit) return std::format("the machine is busy with other work (load {:.1f})", others);
  }
  return std::nullopt;
}

}  // namespace kvasir::join
