#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/doctor.h"

namespace kvasir::cli {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::Contains;
using testing::Each;
using testing::Field;
using testing::HasSubstr;
using testing::Not;

constexpr double kMs = 1e6;  // ns

json worker(const char* name, double answers, double ms_each, double trip_ms, const char* state = "up") {
  return {{"name", name}, {"state", state}, {"answers", answers}, {"pairs", answers * 4}, {"answer_ns_sum", answers * ms_each * kMs},
          {"round_trip_ns", trip_ms * kMs}};
}

json layer(int number, double rounds, double ms_each) {
  return {{"layer", number}, {"group", "exps"}, {"rounds", rounds}, {"round_ns_sum", rounds * ms_each * kMs}};
}

// A server in good health after `rounds` rounds in each of four layers.
json healthy(double rounds) {
  json root = {{"rounds", 4 * rounds}, {"pairs_remote", 32 * rounds}, {"pairs_local", 0}, {"round_ns_sum", 4 * rounds * 2 * kMs},
               {"hedges", 0}, {"invalid_answers", 0}, {"workers_lost", 0}, {"splits_local", 0}};
  root["workers"] = {worker("a:1", rounds * 3, 1.8, 0.2), worker("b:1", rounds * 3, 1.9, 0.2), worker("c:1", rounds * 3, 1.7, 0.2)};
  root["layers"] = {layer(0, rounds, 2), layer(1, rounds, 2.1), layer(2, rounds, 1.9), layer(3, rounds, 2)};
  return root;
}

Findings look(const json& before, const json& after) {
  Findings findings;
  diagnose(before, after, 3, findings);
  return findings;
}

auto finding(Grade grade, const char* subject, const char* words) {
  return AllOf(Field(&Finding::grade, grade), Field(&Finding::subject, HasSubstr(subject)), Field(&Finding::sentence, HasSubstr(words)));
}

TEST(Doctor, FindsNothingWrongWithAHealthyServer) {
  const Findings findings = look(healthy(100), healthy(200));
  EXPECT_THAT(findings, Each(Field(&Finding::grade, Grade::kGood)));
  EXPECT_THAT(findings, Contains(finding(Grade::kGood, "server", "133 rounds a second")));
}

TEST(Doctor, NamesTheSlowWorkerAndWhy) {
  json after = healthy(200);
  after["workers"][1] = worker("b:1", 600, 1.9, 0.2);
  after["workers"][1]["answer_ns_sum"] = 300 * 1.9 * kMs + 300 * 9 * kMs;  // slow lately
  EXPECT_THAT(look(healthy(100), after), Contains(finding(Grade::kNote, "worker b:1", "its computing is why")));
  after["workers"][1]["round_trip_ns"] = 8 * kMs;
  EXPECT_THAT(look(healthy(100), after), Contains(finding(Grade::kNote, "worker b:1", "the network is why")));
}

TEST(Doctor, NamesTheSlowLayer) {
  json after = healthy(200);
  after["layers"][2] = layer(2, 200, 20);
  EXPECT_THAT(look(healthy(100), after), Contains(finding(Grade::kNote, "layer 2", "slow or few workers")));
}

TEST(Doctor, SaysWhatNoWorkerHolds) {
  json after = healthy(200);
  after["pairs_local"] = 1600;
  EXPECT_THAT(look(healthy(100), after), Contains(finding(Grade::kNote, "coverage", "33 % of the experts' work was done here")));
}

TEST(Doctor, DoesNotTakeHotExpertsForMissingOnes) {
  json after = healthy(200);
  after["pairs_local"] = 1600;
  after["hot_bytes"] = 1e9;
  EXPECT_THAT(look(healthy(100), after), Contains(finding(Grade::kGood, "coverage", "KVASIR_HOT")));
}

TEST(Doctor, SaysWhoIsNotThere) {
  json after = healthy(200);
  after["workers"].push_back(worker("d:1", 0, 0, 0, "down"));
  after["workers"].push_back(worker("e:1", 0, 0, 0, "refused"));
  after["workers"].push_back(worker("f:1", 0, 0, 0, "quarantined"));
  const Findings findings = look(healthy(100), after);
  EXPECT_THAT(findings, Contains(finding(Grade::kBad, "worker d:1", "cannot be reached")));
  EXPECT_THAT(findings, Contains(finding(Grade::kBad, "worker e:1", "refuses this backbone")));
  EXPECT_THAT(findings, Contains(finding(Grade::kBad, "worker f:1", "kvasir verify")));
}

TEST(Doctor, SaysThatTheNetworkDecides) {
  json before = healthy(100), after = healthy(200);
  for (json& w : after["workers"]) w["round_trip_ns"] = 1.5 * kMs;
  EXPECT_THAT(look(before, after), Contains(finding(Grade::kNote, "network", "there and back")));
}

TEST(Doctor, AnIdleServerSaysNothingAboutSpeed) {
  const Findings findings = look(healthy(100), healthy(100));
  EXPECT_THAT(findings, Contains(finding(Grade::kNote, "server", "while a request is being answered")));
  EXPECT_THAT(findings, Not(Contains(Field(&Finding::subject, "network"))));
}

TEST(Doctor, TakesAnyJson) {
  for (const char* text : {"{}", R"({"workers":7,"layers":{}})", R"({"workers":[1,null,{}],"layers":["x"],"rounds":"many"})",
                           R"({"workers":[{"name":3,"state":[]}],"rounds":9,"pairs_local":-1})"}) {
    const json root = json::parse(text);
    EXPECT_FALSE(look(root, root).empty()) << text;
    EXPECT_FALSE(look(healthy(100), root).empty()) << text;
    EXPECT_FALSE(look(root, healthy(100)).empty()) << text;
  }
}

}  // namespace
}  // namespace kvasir::cli
