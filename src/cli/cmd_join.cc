// kvasir join: give a machine's memory to a hub's models.

#include <CLI/CLI.hpp>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <format>
#include <memory>
#include <thread>

#include "cli/commands.h"
#include "cli/confine_option.h"
#include "cli/console.h"
#include "cli/lan.h"
#include "cli/live_line.h"
#include "cli/log_format.h"
#include "cli/metrics_option.h"
#include "cli/node_token.h"
#include "ffn/brief_waits.h"
#include "ffn/device.h"
#include "ggml.h"
#include "join/node.h"
#include "spdlog/spdlog.h"

namespace kvasir::cli {
namespace {

struct Options {
  join::NodeOptions node;
  std::string url, token_file, serve, schedule, data_dir, cache_dir, relay = "auto";
  double busy_load = 0;
  LogOptions log;
  std::string metrics;
  bool no_confine = false;
};

std::atomic<bool> stop_asked{false};
void on_stop_signal(int) { stop_asked = true; }

// Naps short enough for a signal to be noticed.
bool wait_or_stop(Nanos time) {
  constexpr Nanos kNap = std::chrono::milliseconds(50);
  for (const TimePoint end = monotonic_now() + time; !stop_asked;) {
    const Nanos left = end - monotonic_now();
    if (left <= Nanos::zero()) return true;
    std::this_thread::sleep_for(std::min(left, kNap));
  }
  return false;
}

std::string default_folder(const char* variable, const char* under_home) {
  if (const char* xdg = std::getenv(variable); xdg && *xdg) return std::string(xdg) + "/kvasir";
  if (const char* home = std::getenv("HOME"); home && *home) return std::string(home) + under_home;
  return "kvasir-data";
}

Status prepare(Options& options) {
  join::NodeOptions& node = options.node;
  if (options.url.empty()) {
    KVASIR_ASSIGN(options.url, find_hub(node.hub.ca_file));
  }
  node.hub.url = options.url;
  if (node.hub.token.empty()) {
    KVASIR_ASSIGN(node.hub.token, read_node_token(options.token_file));
  }
  KVASIR_ASSIGN(node.hub, hub::check_address(node.hub));
  if (!options.schedule.empty()) {
    KVASIR_ASSIGN(node.conditions.schedule, join::parse_hours(options.schedule));
  }
  if (options.busy_load > 0) node.conditions.load_max = options.busy_load;
  // Beside a hub on this machine: reachable on this machine, and without its relay.
  const bool local = node.hub.url.starts_with("http://");
  node.reach = options.relay == "only"                     ? join::NodeReach::kRelayOnly
               : options.relay == "never" || local         ? join::NodeReach::kDirectOnly
                                                           : join::NodeReach::kBoth;
  const bool loopback = local || node.reach == join::NodeReach::kRelayOnly;
  KVASIR_ASSIGN(node.listen, net::parse_host_port(options.serve, loopback ? "127.0.0.1" : "0.0.0.0"));
  KVASIR_ASSIGN(const std::vector<net::Address> addresses, net::resolve(node.listen));
  node.tls = !addresses.front().text.starts_with("127.") && !addresses.front().text.starts_with("[::1]");
  if (node.reach != join::NodeReach::kDirectOnly) node.tls = true;  // one fingerprint for both ways
  node.data_dir = options.data_dir.empty() ? default_folder("XDG_DATA_HOME", "/.local/share/kvasir") : options.data_dir;
  node.cache_dir =
      options.cache_dir.empty() ? default_folder("XDG_CACHE_HOME", "/.cache/kvasir") + "/slices" : options.cache_dir;
  if (node.n_threads <= 0) node.n_threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  node.software = std::string("kvasir ") + KVASIR_VERSION;
  return {};
}

// How fast a counter has grown over the last seconds.
struct Rate {
  static constexpr double kSpanS = 4;
  std::uint64_t last = 0;
  TimePoint at{};
  double per_s = 0;
  double update(std::uint64_t count) {
    const TimePoint now = monotonic_now();
    const double passed = std::chrono::duration<double>(now - at).count();
    if (at == TimePoint{} || count < last) {
      per_s = 0;
    } else if (passed > 0) {
      const double weight = std::min(1.0, passed / kSpanS);
      per_s += weight * (static_cast<double>(count - last) / passed - per_s);
    }
    last = count;
    at = now;
    return per_s < 0.05 ? 0 : per_s;
  }
};

std::string describe(const join::NodeStatus& status, Rate& rate) {
  const double per_s = rate.update(status.pairs);
  if (status.experts == 0 && status.requests == 0) return status.state;
  return std::format("{}: {} experts{} · {} requests · {:.{}f} expert uses/s · {} in, {} out", status.state,
                     status.experts, status.model.empty() ? "" : " of " + status.model, status.requests, per_s,
                     per_s < 10 ? 1 : 0, format_bytes(status.bytes_received), format_bytes(status.bytes_sent));
}

int run(Options& options) {
  ffn::wait_briefly();
  if (const Status prepared = prepare(options); !prepared) return report(prepared);
  start_log("join", options.log, "%H:%M:%S %^%l%$ %v");
  ::unsetenv("GGML_BACKEND_PATH");  // a backbone's plugin is no business of a node
  if (options.node.device == "CPU") ffn::leave_gpu_drivers_out();
  ggml_log_set(
      [](ggml_log_level level, const char* text, void*) {
        if (level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
      },
      nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGTERM, on_stop_signal);
  std::signal(SIGINT, on_stop_signal);
  Confinement files;
  files.keeps(options.node.data_dir.string());
  files.keeps(options.node.cache_dir.string());
  files.reads(options.node.hub.ca_file);
  if (!is_metrics_port(options.metrics)) files.rewrites(options.metrics);
  files.computes_on(options.node.device);
  spdlog::info("{}", files.enforce(options.no_confine));
  // A line about now at the foot of the log, where somebody looks.
  auto live = std::make_shared<LiveLine>(!options.log.quiet && !options.log.is_json());
  options.node.log = [live](const std::string& line) { live->above([&] { spdlog::info("{}", line); }); };
  options.node.warn = [live](const std::string& line) { live->above([&] { spdlog::warn("{}", line); }); };
  options.node.status = [live, rate = Rate()](const join::NodeStatus& status) mutable {
    live->show(describe(status, rate));
  };
  if (is_metrics_port(options.metrics)) {
    const auto where = net::parse_host_port(options.metrics, "127.0.0.1");
    if (!where) return report(where.error());
    options.node.metrics_port = *where;
  } else {
    options.node.metrics_file = options.metrics;
  }
  options.node.wait = wait_or_stop;
  auto bar = std::make_shared<std::unique_ptr<ProgressBar>>();
  options.node.fetch.progress = [bar, live](std::uint64_t done, std::uint64_t total) {
    if (!live->shown()) return;
    if (!*bar) *bar = std::make_unique<ProgressBar>("fetch");
    (*bar)->update(done, total);
    if (done == total) bar->reset();
  };
  return report(join::run_node(options.node));
}

}  // namespace

void add_join(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  options->serve = "0";
  join::NodeOptions& node = options->node;
  CLI::App* command = app.add_subcommand("join", "Serve what a hub finds scarce, with the memory you can spare");
  command->add_option("hub", options->url,
                      "https://HOST of the hub; without it, the one of this network whose certificate --ca-file has");
  command->add_option("--memory", node.memory_bytes, "bytes that experts may take (340M, 2G)")
      ->transform(CLI::AsSizeValue(false))
      ->required();
  command->add_option("--token", node.hub.token,
                      "node token; better in --token-file or KVASIR_TOKEN, where others cannot see it");
  command->add_option("--token-file", options->token_file, "file with the node token");
  command->add_option("--ca-file", node.hub.ca_file, "PEM certificate of a hub that signed its own");
  command->add_option("--model", node.model, "only this model (default: whichever is scarcest)");
  command->add_option("--disk", node.fetch.quota_bytes, "bytes that fetched slices may take")
      ->transform(CLI::AsSizeValue(false));
  command->add_option("--data-cap", node.fetch.daily_bytes_max, "bytes to fetch in a day at most")
      ->transform(CLI::AsSizeValue(false));
  command->add_option("--rate", node.fetch.bytes_per_s_max, "bytes a second to fetch at most")
      ->transform(CLI::AsSizeValue(false));
  command->add_option("--device", node.device, "ggml device to compute on, e.g. Vulkan0")->capture_default_str();
  command->add_option("--threads", node.n_threads, "threads to compute with (default: one a core)")
      ->check(CLI::Range(1, ffn::kThreadsMax));
  node.n_threads = 0;
  command->add_flag("!--no-tune", node.tune, "do not measure plans and speed before serving");
  command->add_option("--nice", node.nice, "give way to other programs: 0 to 19")->check(CLI::Range(0, 19));
  command->add_flag("--only-on-ac", node.conditions.only_on_ac, "pause on battery");
  command->add_option("--pause-when-busy", options->busy_load, "pause while other programs' load is above this")
      ->check(CLI::PositiveNumber);
  command->add_option("--schedule", options->schedule, "hours to work in, e.g. 22:00-07:00");
  command->add_option("--serve", options->serve, "[HOST:]PORT to listen on (default: any port)");
  command->add_option("--relay", options->relay,
                      "auto: through the hub too, for backbones that cannot reach this machine; only; never")
      ->check(CLI::IsMember({"auto", "only", "never"}))
      ->capture_default_str();
  command->add_option("--advertise", node.advertise, "host under which backbones reach this machine");
  command->add_option("--data", options->data_dir, "folder of this node's identity");
  command->add_option("--cache", options->cache_dir, "folder of fetched slices");
  add_log_options(*command, options->log);
  add_confine_option(*command, options->no_confine);
  command->add_option("--metrics", options->metrics, kMetricsHelp);
  command->add_flag("--once", node.once, "fetch one assignment, see it counted, print its files, and end");
  command->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace kvasir::cli
