#include "join/conditions.h"

#include <gtest/gtest.h>

#include <fstream>

namespace kvasir::join {
namespace {

namespace fs = std::filesystem;

TEST(Hours, SpanMidnightOrNot) {
  const Hours night = *parse_hours("22:00-07:00"), day = *parse_hours("09:30-17:00");
  for (const int minute : {22 * 60, 23 * 60 + 59, 0, 6 * 60 + 59}) EXPECT_TRUE(night.contains(minute)) << minute;
  for (const int minute : {7 * 60, 12 * 60, 21 * 60 + 59}) EXPECT_FALSE(night.contains(minute)) << minute;
  EXPECT_TRUE(day.contains(9 * 60 + 30));
  EXPECT_FALSE(day.contains(17 * 60));
  for (const char* text : {"", "22:00", "22:00-", "25:00-07:00", "22:60-07:00", "22-07", "22:00-22:00", "22:00-07:00 ",
                           "-1:00-07:00", "ab:cd-07:00"})
    EXPECT_FALSE(parse_hours(text)) << text;
}

TEST(Pausing, ForEachReasonAndBackOnlyWhenItIsClearlyOver) {
  Conditions conditions;
  conditions.only_on_ac = true;
  conditions.load_max = 2;
  conditions.schedule = *parse_hours("22:00-07:00");
  MachineState night{.on_ac = true, .load = 1, .minute_of_day = 60};
  EXPECT_FALSE(reason_to_pause(conditions, night, false, 0));
  MachineState state = night;
  state.minute_of_day = 12 * 60;
  EXPECT_NE(reason_to_pause(conditions, state, false, 0)->find("schedule"), std::string::npos);
  state = night;
  state.on_ac = false;
  EXPECT_NE(reason_to_pause(conditions, state, false, 0)->find("battery"), std::string::npos);
  state.on_ac.reset();  // no battery at all
  EXPECT_FALSE(reason_to_pause(conditions, state, false, 0));
  state = night;
  state.load = 3;
  EXPECT_TRUE(reason_to_pause(conditions, state, false, 0));
  EXPECT_FALSE(reason_to_pause(conditions, state, false, 1.5));  // half of it is our own
  state.load = 1.8;
  EXPECT_FALSE(reason_to_pause(conditions, state, false, 0));
  EXPECT_TRUE(reason_to_pause(conditions, state, true, 0));
}

TEST(Machine, ReadsPowerSupplies) {
  char folder[] = "/tmp/kvasir-power-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const fs::path top = folder;
  const auto write = [&](const std::string& supply, const std::string& name, const std::string& text) {
    fs::create_directories(top / supply);
    std::ofstream(top / supply / name) << text << '\n';
  };
  EXPECT_EQ(look_at_machine(top).on_ac, std::nullopt);  // a desktop
  write("AC", "type", "Mains");
  write("AC", "online", "1");
  write("BAT0", "type", "Battery");
  write("BAT0", "status", "Charging");
  write("hid-mouse", "type", "Battery");
  write("hid-mouse", "scope", "Device");
  write("hid-mouse", "status", "Discharging");
  EXPECT_EQ(look_at_machine(top).on_ac, true);
  write("AC", "online", "0");
  write("BAT0", "status", "Discharging");
  EXPECT_EQ(look_at_machine(top).on_ac, false);
  fs::remove_all(top);
}

}  // namespace
}  // namespace kvasir::join
