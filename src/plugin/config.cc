#include "plugin/config.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <format>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

namespace kvasir::plugin {
namespace {

constexpr std::size_t kConfigFileBytesMax = 1 << 20;
constexpr std::uint64_t kHotBytesMax = 16ull << 40;

constexpr auto kVariables = std::to_array<Variable>({
    {"KVASIR_WORKERS", "host:port[#fingerprint],…", "workers to use"},
    {"KVASIR_RELAY", "https://host", "the hub through which workers named relay:… are reached"},
    {"KVASIR_RELAY_TOKEN", "text", "node token of that hub (default: KVASIR_TOKEN)"},
    {"KVASIR_RELAY_CA", "file", "PEM certificate of a hub that signed its own"},
    {"KVASIR_HUB", "URL", "hub that says which workers to use, instead of a list of them"},
    {"KVASIR_HUB_CA", "file", "certificate of a hub that signed its own"},
    {"KVASIR_TOKEN", "text", "node token shown to the hub, or to the workers of a list"},
    {"KVASIR_CONFIG", "file", "JSON object with any of these names; the environment wins"},
    {"KVASIR_NUMERICS", "exact|invariant|fast", "numeric class"},
    {"KVASIR_WIRE", "f32|f16|bf16|q8|auto", "how rows travel; only with KVASIR_NUMERICS=fast"},
    {"KVASIR_LOCAL", "fallback|never|only", "what to do with pairs no worker answers"},
    {"KVASIR_REPLICA", "mmap|ram|none", "where the local replica of the experts lives"},
    {"KVASIR_HOT", "bytes[K|M|G]", "experts used most are computed here while workers compute the others"},
    {"KVASIR_OVERLAP", "0|1", "compute a layer's shared expert here while the workers' answers are on their way"},
    {"KVASIR_UPLOAD", "0|1", "hand experts that no worker holds to workers that offer memory"},
    {"KVASIR_SPOT_CHECK", "0…1", "share of the workers' answers that is computed a second time"},
    {"KVASIR_CONNECT_MS", "0:60000", "how long the first round waits for workers that are still connecting"},
    {"KVASIR_NO_REPLICA_MS", "0:600000", "without local compute: how long a round waits for a worker that holds a lost expert"},
    {"KVASIR_HEDGE_MS", "0:60000", "a second worker is asked no earlier than this"},
    {"KVASIR_FALLBACK_MS", "0:60000", "a late answer is given up, and computed here, no earlier than this"},
    {"KVASIR_SPIN_US", "0:10000", "how long an answer is looked for without giving the processor away"},
    {"KVASIR_STATS", "0|1", "print counters on stderr at exit"},
    {"KVASIR_STATS_FILE", "file", "counters as JSON, rewritten each second"},
    {"KVASIR_METRICS_FILE", "file", "counters for Prometheus, rewritten each second"},
    {"KVASIR_DISCOVERY", "0|1", "whether the kvasir commands speak on the local network; the plugin never does"},
});

using Values = std::map<std::string, std::string, std::less<>>;

Status read_file(const std::string& path, Values& values) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return fix_input(std::format("cannot read the settings file '{}' named by KVASIR_CONFIG; check its path.", path));
  std::string text(kConfigFileBytesMax + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(in.gcount()));
  if (text.size() > kConfigFileBytesMax) return fix_input(std::format("the settings file '{}' is larger than 1 MiB; it should hold a few lines.", path));
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false, /*ignore_comments=*/true);
  if (!json.is_object()) return fix_input(std::format("the settings file '{}' is not a JSON object; write {{\"KVASIR_WORKERS\": \"host:port\"}}.", path));
  for (const auto& [name, value] : json.items()) {
    if (std::ranges::none_of(kVariables, [&](const Variable& v) { return v.name == name; }))
      return fix_input(std::format("the settings file '{}' has an unknown name '{}'; see docs/configuration.md.", path, name));
    values[name] = value.is_string() ? value.get<std::string>() : value.dump();
  }
  return {};
}

template <typename T>
using Choices = std::initializer_list<std::pair<std::string_view, T>>;

template <typename T>
Status choose(const Values& values, std::string_view name, Choices<T> choices, T& out) {
  const auto it = values.find(name);
  if (it == values.end()) return {};
  std::string allowed;
  for (const auto& [text, value] : choices) {
    if (it->second == text) {
      out = value;
      return {};
    }
    allowed += std::format("{}{}", allowed.empty() ? "" : ", ", text);
  }
  return fix_input(std::format("{}={} is not known; use one of: {}.", name, it->second, allowed));
}

// A whole number of `Unit`s inside the variable's bounds.
template <typename Unit>
Status read_time(const Values& values, std::string_view name, std::int64_t max, Nanos& out) {
  const auto it = values.find(name);
  if (it == values.end()) return {};
  std::int64_t n = -1;
  const char* text_end = it->second.data() + it->second.size();
  const auto [end, error] = std::from_chars(it->second.data(), text_end, n);
  if (error != std::errc{} || end != text_end || n < 0 || n > max)
    return fix_input(std::format("{}={} is not a number of {}seconds from 0 to {}.", name, it->second,
                                 std::is_same_v<Unit, std::chrono::microseconds> ? "micro" : "milli", max));
  out = Unit(n);
  return {};
}

// "4G", "512M", "1000000"
Status read_bytes(const Values& values, std::string_view name, std::uint64_t& out) {
  const auto it = values.find(name);
  if (it == values.end()) return {};
  const char* text_end = it->second.data() + it->second.size();
  std::uint64_t n = 0;
  const auto [end, error] = std::from_chars(it->second.data(), text_end, n);
  const std::string_view unit(end, text_end);
  const int shift = unit.empty() ? 0 : unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : -1;
  if (error != std::errc{} || shift < 0 || n > (kHotBytesMax >> shift))
    return fix_input(std::format("{}={} is not a size up to 16 TiB, such as 512M or 4G.", name, it->second));
  out = n << shift;
  return {};
}

Status read_hot(const Values& values, dispatch::Options& options) {
  KVASIR_TRY(read_bytes(values, "KVASIR_HOT", options.hot_bytes_max));
  if (options.hot_bytes_max > 0 && options.local != dispatch::LocalPolicy::kFallback)
    return fix_input("KVASIR_HOT computes experts here beside the workers', which only KVASIR_LOCAL=fallback allows; leave one of them out.");
  return {};
}

// Without a replica nothing can be computed here, whatever else was asked for.
Status check_replica(const Values& values, Config& config) {
  if (config.replica != Replica::kNone) return {};
  if (values.contains("KVASIR_LOCAL") && config.dispatch.local != dispatch::LocalPolicy::kNever)
    return fix_input(std::format("KVASIR_REPLICA=none keeps no expert that KVASIR_LOCAL={} could use; leave one of them out.",
                                 values.find("KVASIR_LOCAL")->second));
  if (config.upload) return fix_input("KVASIR_REPLICA=none keeps no expert that KVASIR_UPLOAD=1 could hand out; leave one of them out.");
  config.dispatch.local = dispatch::LocalPolicy::kNever;
  return {};
}

Status read_wire(const Values& values, dispatch::Options& options) {
  using wire::RowType;
  const auto it = values.find("KVASIR_WIRE");
  if (it == values.end()) return {};
  if (options.numerics != wire::Numerics::kFast)
    return fix_input(std::format("KVASIR_WIRE={} would change the bits that KVASIR_NUMERICS={} promises; leave it out, or set KVASIR_NUMERICS=fast.",
                                 it->second, options.numerics == wire::Numerics::kExact ? "exact" : "invariant"));
  options.wire_auto = it->second == "auto";
  KVASIR_TRY(choose<RowType>(values, "KVASIR_WIRE", {{"auto", RowType::kF32}, {"f32", RowType::kF32}, {"f16", RowType::kF16}, {"bf16", RowType::kBF16}, {"q8", RowType::kQ8}},
                             options.row_type));
  options.result_type = options.row_type;
  return {};
}

}  // namespace

std::span<const Variable> variables() { return kVariables; }

Result<Config> load_config(const std::function<std::optional<std::string>(std::string_view)>& get,
                           std::span<const std::string> present, std::vector<std::string>& warnings) {
  for (const std::string& name : present)
    if (std::ranges::none_of(kVariables, [&](const Variable& v) { return v.name == name; }))
      warnings.push_back(std::format("the variable {} is not known and has no effect; see docs/configuration.md.", name));

  Values values;
  if (const auto file = get("KVASIR_CONFIG"); file && !file->empty()) KVASIR_TRY(read_file(*file, values));
  for (const Variable& v : kVariables)
    if (auto value = get(v.name)) values[std::string(v.name)] = *value;
  std::erase_if(values, [](const auto& item) { return item.second.empty(); });

  Config config;
  using dispatch::LocalPolicy;
  KVASIR_TRY(choose<LocalPolicy>(values, "KVASIR_LOCAL",
                                 {{"fallback", LocalPolicy::kFallback}, {"never", LocalPolicy::kNever}, {"only", LocalPolicy::kOnly}},
                                 config.dispatch.local));
  KVASIR_TRY(choose<Replica>(values, "KVASIR_REPLICA", {{"mmap", Replica::kMmap}, {"ram", Replica::kRam}, {"none", Replica::kNone}}, config.replica));
  KVASIR_TRY(choose<wire::Numerics>(values, "KVASIR_NUMERICS", {{"exact", wire::Numerics::kExact}, {"invariant", wire::Numerics::kInvariant}, {"fast", wire::Numerics::kFast}},
                                  config.dispatch.numerics));
  KVASIR_TRY(read_wire(values, config.dispatch));
  KVASIR_TRY(choose<bool>(values, "KVASIR_OVERLAP", {{"0", false}, {"1", true}}, config.overlap));
  KVASIR_TRY(choose<bool>(values, "KVASIR_UPLOAD", {{"0", false}, {"1", true}}, config.upload));
  KVASIR_TRY(choose<bool>(values, "KVASIR_STATS", {{"0", false}, {"1", true}}, config.stats_at_exit));
  if (const auto it = values.find("KVASIR_STATS_FILE"); it != values.end()) config.stats_file = it->second;
  if (const auto it = values.find("KVASIR_METRICS_FILE"); it != values.end()) config.metrics_file = it->second;
  if (const auto it = values.find("KVASIR_TOKEN"); it != values.end()) config.dispatch.token = it->second;
  if (const auto it = values.find("KVASIR_WORKERS"); it != values.end()) {
    KVASIR_ASSIGN(config.dispatch.workers, dispatch::parse_workers(it->second));
  }
  for (const dispatch::WorkerAddress& worker : config.dispatch.workers) {
    if (!worker.host.empty()) continue;  // it has an address of its own beside the relay
    if (worker.fingerprint.empty())
      return fix_input(std::format("the worker relay:{} is used only with its fingerprint; paste the whole link that it prints.", worker.relay));
    if (!values.contains("KVASIR_RELAY"))
      return fix_input(std::format("the worker relay:{} waits at a relay; set KVASIR_RELAY to the https:// address of that hub.", worker.relay));
  }
  if (const auto it = values.find("KVASIR_RELAY"); it != values.end()) {
    const auto text = [&](std::string_view name) {
      const auto found = values.find(name);
      return found == values.end() ? std::string() : found->second;
    };
    net::RelayOptions& relay = config.dispatch.relay.emplace();
    relay.url = it->second;
    relay.token = values.contains("KVASIR_RELAY_TOKEN") ? text("KVASIR_RELAY_TOKEN") : config.dispatch.token;
    relay.ca_file = text("KVASIR_RELAY_CA");
    KVASIR_TRY(net::RelayDialer::create(relay));  // what is wrong is said now
  }
  KVASIR_TRY(check_replica(values, config));
  KVASIR_TRY(read_hot(values, config.dispatch));
  using std::chrono::milliseconds;
  KVASIR_TRY(read_time<milliseconds>(values, "KVASIR_CONNECT_MS", 60000, config.dispatch.connect_wait));
  KVASIR_TRY(read_time<milliseconds>(values, "KVASIR_NO_REPLICA_MS", 600000, config.dispatch.no_replica_wait));
  KVASIR_TRY(read_time<milliseconds>(values, "KVASIR_HEDGE_MS", 60000, config.dispatch.hedge_floor));
  KVASIR_TRY(read_time<milliseconds>(values, "KVASIR_FALLBACK_MS", 60000, config.dispatch.fallback_floor));
  KVASIR_TRY(read_time<std::chrono::microseconds>(values, "KVASIR_SPIN_US", 10000, config.dispatch.spin));
  if (const auto it = values.find("KVASIR_SPOT_CHECK"); it != values.end()) {
    double share = 0;
    const auto [end, error] = std::from_chars(it->second.data(), it->second.data() + it->second.size(), share);
    if (error != std::errc{} || end != it->second.data() + it->second.size() || !(share >= 0 && share <= 1))
      return fix_input(std::format("KVASIR_SPOT_CHECK={} is not a share from 0 to 1; the default is 0.005.", it->second));
    config.dispatch.spot_check = share;
  }
  if (const auto it = values.find("KVASIR_HUB"); it != values.end()) {
    if (!config.dispatch.workers.empty())
      return fix_input("KVASIR_HUB and KVASIR_WORKERS both say which workers to use; set one of them.");
    if (config.upload) return fix_input("KVASIR_UPLOAD=1 is for workers of your own (KVASIR_WORKERS); nodes of a hub fetch from it.");
    const auto ca_file = values.find("KVASIR_HUB_CA");
    KVASIR_ASSIGN(config.hub, hub::check_address({it->second, config.dispatch.token, ca_file == values.end() ? "" : ca_file->second}));
    // Workers that can only dial out wait at the hub itself.
    if (!config.dispatch.relay) {
      config.dispatch.relay = net::RelayOptions{.url = config.hub->url, .token = config.hub->token, .ca_file = config.hub->ca_file};
      KVASIR_TRY(net::RelayDialer::create(*config.dispatch.relay));
    }
    // Workers are shown the tickets that the hub gives out for them, and the hub's token never.
    config.dispatch.token.clear();
    config.dispatch.workers_follow = true;
  }
  if (config.dispatch.local == LocalPolicy::kNever && config.dispatch.workers.empty() && !config.hub)
    return fix_input("KVASIR_LOCAL=never needs workers; set KVASIR_WORKERS=host:port,…, or KVASIR_HUB.");
  return config;
}

Result<Config> load_config_from_environment(std::vector<std::string>& warnings) {
  std::vector<std::string> present;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    if (text.starts_with("KVASIR_")) present.emplace_back(text.substr(0, text.find('=')));
  }
  const auto get = [](std::string_view name) -> std::optional<std::string> {
    const char* value = std::getenv(std::string(name).c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  };
  return load_config(get, present, warnings);
}

}  // namespace kvasir::plugin
