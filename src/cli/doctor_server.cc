#include <algorithm>
#include <cmath>
#include <format>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/doctor.h"

namespace kvasir::cli {
namespace {

using nlohmann::json;

constexpr auto kFreshWithin = std::chrono::seconds(5);  // the plugin rewrites it each second
constexpr double kLocalShareLow = 0.01;
constexpr double kHedgeShareHigh = 0.03;   // of requests; the budget is 0.05
constexpr double kSlowAgainstMedian = 1.5;  // what makes one of several stand out
constexpr std::uint64_t kAnswersMin = 8;    // fewer say nothing about a worker
constexpr std::uint64_t kRoundsMin = 4;     // …about a layer

double number(const json& object, const char* name) {
  const auto it = object.find(name);
  return it != object.end() && it->is_number() ? it->get<double>() : 0;
}

std::string text(const json& object, const char* name) {
  const auto it = object.find(name);
  return it != object.end() && it->is_string() ? it->get<std::string>() : "";
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

std::string ms(double ns) { return std::format("{:.2g} ms", ns / 1e6); }

// Entries of a list by what names them, so that two readings can be compared.
const json* find_entry(const json& list, const json& entry, std::initializer_list<const char*> keys) {
  for (const json& other : list)
    if (other.is_object() && std::ranges::all_of(keys, [&](const char* key) { return other.value(key, json()) == entry.value(key, json()); }))
      return &other;
  return nullptr;
}

const json& list_of(const json& root, const char* name) {
  static const json kNone = json::array();
  const auto it = root.find(name);
  return it != root.end() && it->is_array() ? *it : kNone;
}

struct Timed {
  std::string name;
  double count = 0;    // in the time between the readings
  double mean_ns = 0;
  double round_trip_ns = 0;
};

std::vector<Timed> worker_times(const json& before, const json& after) {
  std::vector<Timed> out;
  for (const json& w : list_of(after, "workers")) {
    if (!w.is_object()) continue;
    const json* old = find_entry(list_of(before, "workers"), w, {"name"});
    const double n = number(w, "answers") - (old ? number(*old, "answers") : 0);
    const double ns = number(w, "answer_ns_sum") - (old ? number(*old, "answer_ns_sum") : 0);
    if (n >= kAnswersMin) out.push_back({text(w, "name"), n, ns / n, number(w, "round_trip_ns")});
  }
  return out;
}

std::vector<Timed> layer_times(const json& before, const json& after) {
  std::vector<Timed> out;
  for (const json& layer : list_of(after, "layers")) {
    if (!layer.is_object()) continue;
    const json* old = find_entry(list_of(before, "layers"), layer, {"layer", "group"});
    const double n = number(layer, "rounds") - (old ? number(*old, "rounds") : 0);
    const double ns = number(layer, "round_ns_sum") - (old ? number(*old, "round_ns_sum") : 0);
    const std::string group = text(layer, "group") == "exps" ? "" : " (" + text(layer, "group") + ")";
    if (n >= kRoundsMin) out.push_back({std::format("layer {}{}", number(layer, "layer"), group), n, ns / n, 0});
  }
  return out;
}

// The one whose mean is far above the others' median; null if none stands out.
const Timed* outlier(const std::vector<Timed>& all, double& others) {
  const Timed* slowest = nullptr;
  for (const Timed& one : all)
    if (!slowest || one.mean_ns > slowest->mean_ns) slowest = &one;
  if (!slowest || all.size() < 2) return nullptr;
  std::vector<double> rest;
  for (const Timed& one : all)
    if (&one != slowest) rest.push_back(one.mean_ns);
  others = median(std::move(rest));
  return slowest->mean_ns > kSlowAgainstMedian * others ? slowest : nullptr;
}

void diagnose_states(const json& after, Findings& findings) {
  if (list_of(after, "workers").empty()) {
    findings.push_back({Grade::kNote, "workers", "the server has none, and computes everything itself; set KVASIR_WORKERS or KVASIR_HUB."});
    return;
  }
  for (const json& w : list_of(after, "workers")) {
    const std::string state = w.is_object() ? text(w, "state") : "";
    if (state == "up" || state.empty()) continue;
    std::string what;
    if (state == "refused")
      what = "refuses this backbone; the server's log has its sentence, and kvasir doctor --workers says it again.";
    else if (state == "quarantined")
      what = "answered wrongly and is asked nothing for a while; judge it with kvasir verify.";
    else if (state == "draining")
      what = "is stopping, as it was told to.";
    else
      what = "cannot be reached: see that it runs and that its port is open.";
    findings.push_back({state == "draining" ? Grade::kNote : Grade::kBad, "worker " + text(w, "name"),
                        what + " Its experts are asked elsewhere, or computed here."});
  }
}

void diagnose_workers(const json& before, const json& after, Findings& findings) {
  const std::vector<Timed> workers = worker_times(before, after);
  if (workers.empty()) return;
  double others = 0;
  if (const Timed* slow = outlier(workers, others)) {
    const bool far = slow->round_trip_ns > slow->mean_ns / 2;
    findings.push_back({Grade::kNote, "worker " + slow->name,
                        std::format("takes {} an answer where the others take {}, and each layer waits for its slowest: {}",
                                    ms(slow->mean_ns), ms(others),
                                    far ? std::format("the network is why ({} there and back); a cable or a nearer machine helps.",
                                                      ms(slow->round_trip_ns))
                                        : "its computing is why; give it fewer experts, or a second worker the same ones.")});
  }
  std::vector<double> times, trips;
  for (const Timed& w : workers) {
    times.push_back(w.mean_ns);
    trips.push_back(w.round_trip_ns);
  }
  const double answer = median(times), trip = median(trips);
  if (trip > answer / 2)
    findings.push_back({Grade::kNote, "network", std::format("an answer takes {}, of which {} are the way there and back: nearer workers, "
                                                             "cables instead of Wi-Fi, and several conversations at once help.",
                                                             ms(answer), ms(trip))});
  else
    findings.push_back({Grade::kGood, "network", std::format("an answer takes {}, of which {} are the way there and back.", ms(answer), ms(trip))});
}

void diagnose_layers(const json& before, const json& after, Findings& findings) {
  const std::vector<Timed> layers = layer_times(before, after);
  double others = 0;
  if (const Timed* slow = outlier(layers, others))
    findings.push_back({Grade::kNote, slow->name,
                        std::format("takes {} a round where the others take {}: its experts lie on slow or few workers; a second copy of "
                                    "them helps.",
                                    ms(slow->mean_ns), ms(others))});
  else if (!layers.empty())
    findings.push_back({Grade::kGood, "layers", std::format("none of {} stands out; a round takes {}.", layers.size(), ms(median([&] {
                                                  std::vector<double> all;
                                                  for (const Timed& layer : layers) all.push_back(layer.mean_ns);
                                                  return all;
                                                }())))});
}

}  // namespace

void diagnose(const json& before, const json& after, double seconds, Findings& findings) {
  const auto grown = [&](const char* name) { return std::max(0.0, number(after, name) - number(before, name)); };
  diagnose_states(after, findings);
  const double rounds = grown("rounds"), remote = grown("pairs_remote"), local = grown("pairs_local");
  if (rounds == 0) {
    findings.push_back({Grade::kNote, "server", std::format("computed no expert layer in {:.0f} s: run this while a request is being answered.", seconds)});
    return;
  }
  const double busy = grown("round_ns_sum") / 1e9 / seconds;
  findings.push_back({Grade::kGood, "server", std::format("{:.0f} rounds a second, {} each; {:.0f} % of the time went into expert layers.",
                                                          rounds / seconds, ms(grown("round_ns_sum") / rounds), std::min(1.0, busy) * 100)});
  if (remote + local > 0) {
    const double share = local / (remote + local);
    if (share > kLocalShareLow && number(after, "hot_bytes") > 0)
      findings.push_back({Grade::kGood, "coverage",
                          std::format("{:.0f} % of the experts' work was done here, where KVASIR_HOT keeps the experts used most.",
                                      share * 100)});
    else if (share > kLocalShareLow)
      findings.push_back({Grade::kNote, "coverage",
                          std::format("{:.0f} % of the experts' work was done here, because no worker answers for them: the text is the "
                                      "same, but slower, and from a cold disk much slower; more workers, or more --memory, help.",
                                      std::max(1.0, share * 100))});
    else
      findings.push_back({Grade::kGood, "coverage", "workers did the experts' work."});
  }
  if (grown("hedges") > kHedgeShareHigh * rounds)
    findings.push_back({Grade::kNote, "hedges", std::format("{:.0f} requests were late enough to be asked again elsewhere: a worker is overloaded, "
                                                            "or the network loses packets.", grown("hedges"))});
  if (grown("invalid_answers") > 0)
    findings.push_back({Grade::kBad, "answers", std::format("{:.0f} were wrong and were thrown away; judge the workers with kvasir verify.",
                                                            grown("invalid_answers"))});
  if (grown("workers_lost") > 0)
    findings.push_back({Grade::kNote, "connections", std::format("{:.0f} were lost just now; the server's log names the workers.",
                                                                 grown("workers_lost"))});
  if (grown("splits_local") > 0 && remote == 0)
    findings.push_back({Grade::kNote, "model", "its expert layers have a shape that the plugin does not know, so that no worker can help; "
                                               "the server's log names it, and docs/models.md has the models that are known to work."});
  diagnose_workers(before, after, findings);
  diagnose_layers(before, after, findings);
}

Status examine_server(const std::filesystem::path& stats_file, std::chrono::milliseconds pause, Findings& findings) {
  const auto read = [&]() -> Result<json> {
    std::ifstream in(stats_file);
    json root = json::parse(in, nullptr, /*allow_exceptions=*/false);
    if (!in.is_open() || !root.is_object())
      return fix_input(std::format("'{}' has no counters; start the server with KVASIR_STATS_FILE={} and try again.",
                                   stats_file.string(), stats_file.string()));
    return root;
  };
  KVASIR_ASSIGN(const json before, read());
  std::error_code error;
  const auto age = std::filesystem::file_time_type::clock::now() - std::filesystem::last_write_time(stats_file, error);
  if (!error && age > kFreshWithin) {
    findings.push_back({Grade::kBad, "server",
                        std::format("has written nothing to '{}' for {} s, though it does so each second: it has ended, or it hangs.",
                                    stats_file.string(), std::chrono::duration_cast<std::chrono::seconds>(age).count())});
    return {};
  }
  std::this_thread::sleep_for(pause);
  KVASIR_ASSIGN(const json after, read());
  diagnose(before, after, std::chrono::duration<double>(pause).count(), findings);
  return {};
}

}  // namespace kvasir::cli
