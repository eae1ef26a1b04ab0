// kvasir worker: serve experts. Also what runs under the older name linkcpp-expert-worker.

#include <CLI/CLI.hpp>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <format>
#include <memory>
#include <thread>

#include "cli/commands.h"
#include "cli/confine_option.h"
#include "cli/console.h"
#include "cli/log_format.h"
#include "cli/metrics_option.h"
#include "cli/node_token.h"
#include "cli/worker_relay.h"
#include "discovery/announcer.h"
#include "ffn/brief_waits.h"
#include "ffn/device.h"
#include "ffn/engine.h"
#include "spdlog/spdlog.h"
#include "worker/raw_session.h"
#include "worker/server.h"
#include "worker/tuning.h"

namespace kvasir::cli {
namespace {

struct Options {
  std::string serve;
  std::vector<std::string> slices;
  std::uint64_t memory_bytes = 0;
  int n_threads = 0;
  std::string device = "CPU";
  std::uint32_t queue = worker::kQueueDefault;
  std::uint32_t queue_ms = worker::kQueueMsDefault;
  std::uint32_t piece_pairs = worker::kPiecePairs;
  std::uint32_t spin_us = worker::kSpinUsDefault;
  std::optional<std::uint32_t> layer;
  bool only_that_layer = false;  // the older name loads nothing else
  bool insecure = false;
  bool insecure_anywhere = false;
  bool tls = false;
  bool no_verify = false;
  bool no_tune = false;
  bool no_announce = false;
  std::string numerics = "any";
  std::string weights = "file";
  LogOptions log;
  std::string data_dir;
  std::string token_file;
  std::string stats_file;
  WorkerRelay relay;
  std::string metrics;
  bool no_confine = false;
};

bool is_loopback(const net::Address& address) {
  return address.text.starts_with("127.") || address.text.starts_with("[::1]");
}

std::string default_data_dir() {
  if (const char* xdg = std::getenv("XDG_DATA_HOME"); xdg && *xdg) return std::string(xdg) + "/kvasir";
  if (const char* home = std::getenv("HOME"); home && *home) return std::string(home) + "/.local/share/kvasir";
  return "kvasir-data";
}

// Whether this port is encrypted; refuses what would carry rows in the clear by accident.
Result<bool> choose_tls(const Options& options, const net::HostPort& where) {
  KVASIR_ASSIGN(const std::vector<net::Address> addresses, net::resolve(where));
  if (is_loopback(addresses.front())) {
    if (options.tls && options.insecure) return fix_input("--tls and --insecure exclude each other.");
    return options.tls;
  }
  if (!options.insecure) return true;
  if (!options.insecure_anywhere)
    return fix_input(std::format("{} can be reached by other machines, and --insecure would serve it to anyone, in the "
                                 "clear: leave --insecure out, or add --insecure-anywhere if that is meant.",
                                 where.host));
  return false;
}

// "host:port[#fingerprint]", ready to paste into KVASIR_WORKERS; with a relay
// "[host:port+]relay:NAME#fingerprint".
std::string link_line(const net::HostPort& where, std::uint16_t port, const net::TlsIdentity* identity, bool encrypted,
                      const WorkerRelay& relay) {
  net::HostPort shown{where.host, port};
  if (where.host == "0.0.0.0" || where.host == "::") {
    // A home network's machines seldom know each other's names, so the address is what can be pasted.
    char name[256] = {};
    if (const std::optional<std::string> address = net::own_address()) shown.host = *address;
    else if (::gethostname(name, sizeof name - 1) == 0 && name[0]) shown.host = name;
  }
  std::string link = net::format_host_port(shown);
  // A port on loopback is plain and for this machine; the fingerprint is that of the relayed door.
  if (relay.asked()) link = encrypted ? link + "+" + relay_address(relay) : relay_address(relay);
  if (relay.plain) return link;
  return identity ? link + "#" + net::format_fingerprint(identity->fingerprint) : link;
}

// ggml's own lines (which backend library it loaded) matter only when something is wrong.
void log_ggml(ggml_log_level level, const char* text, void*) {
  std::string_view line = text;
  while (line.ends_with('\n')) line.remove_suffix(1);
  if (line.empty()) return;
  if (level >= GGML_LOG_LEVEL_WARN && level <= GGML_LOG_LEVEL_ERROR) spdlog::warn("ggml: {}", line);
  else spdlog::debug("ggml: {}", line);
}

std::atomic<worker::Server*> running{nullptr};

void on_stop_signal(int) {
  if (worker::Server* server = running.load()) server->request_stop();
}

std::string data_dir_of(const Options& options) {
  return options.data_dir.empty() ? default_data_dir() : options.data_dir;
}

std::string confine_worker(const Options& options, const discovery::Announcer* announcer) {
  Confinement files;
  files.keeps(data_dir_of(options));
  for (const std::string& slice : options.slices) files.reads_model(slice);
  for (const std::string* file : {&options.token_file, &options.relay.token_file, &options.relay.ca_file}) files.reads(*file);
  files.rewrites(options.stats_file);
  if (!is_metrics_port(options.metrics)) files.rewrites(options.metrics);
  files.computes_on(options.device);
  if (announcer != nullptr) files.ends(announcer->child());
  return files.enforce(options.no_confine);
}

// Picks the plans of class fast, and says which and how fast they are.
Result<ffn::Tuning> tune(const Options& options, const worker::SliceStore& store, ffn::Engine& engine, int n_threads) {
  worker::TuneOptions tune_options;
  tune_options.device = options.device;
  tune_options.n_threads = n_threads;
  tune_options.fast = options.numerics != "exact";
  tune_options.cache_file = data_dir_of(options) + "/plans";
  KVASIR_ASSIGN(const std::optional<worker::WorkerTuning> tuned, worker::tune_store(store, engine, tune_options));
  if (!tuned) return ffn::Tuning{};
  for (const std::string& line : tuned->lines) spdlog::info("{} {}", tuned->cached ? "plan, as measured before:" : "plan:", line);
  return tuned->tuning;
}

// False: connections had to be cut, and threads may still be computing.
Result<bool> serve(const Options& options) {
  ffn::wait_briefly();
  start_log("worker", options.log, "%H:%M:%S.%e %^%l%$ %v");
  // A backbone's plugin, if the environment names one, is no business of a worker: loading
  // it would make this process a backbone, too. Before the first thread starts.
  ::unsetenv("GGML_BACKEND_PATH");
  if (options.device == "CPU") ffn::leave_gpu_drivers_out();
  ggml_log_set(log_ggml, nullptr);
  std::signal(SIGPIPE, SIG_IGN);

  KVASIR_ASSIGN(const net::HostPort where, net::parse_host_port(options.serve, "127.0.0.1"));
  KVASIR_ASSIGN(const bool encrypted, choose_tls(options, where));
  // What listens on this machine alone is of no use to others. A process of its own, so before any thread.
  std::unique_ptr<discovery::Announcer> announcer;
  if (!options.no_announce && discovery::is_enabled() && !net::is_loopback_host(where.host)) {
    KVASIR_ASSIGN(announcer, discovery::Announcer::make());
  }
  const std::string confined = confine_worker(options, announcer.get());
  worker::ServerOptions server_options;
  server_options.queue = options.queue;
  server_options.queue_ms = options.queue_ms;
  server_options.piece_pairs = options.piece_pairs;
  server_options.spin_us = options.spin_us;
  server_options.raw_framing = !encrypted;
  server_options.raw_layer = options.layer;
  server_options.software = std::string("kvasir ") + KVASIR_VERSION;
  server_options.stats_file = options.stats_file;
  if (!is_metrics_port(options.metrics)) server_options.metrics_file = options.metrics;
  server_options.memory_bytes = options.memory_bytes;
  KVASIR_ASSIGN(server_options.token, read_node_token(options.token_file));
  if (!server_options.token.empty()) server_options.raw_framing = options.insecure;  // that framing has no token
  std::optional<net::TlsIdentity> identity;
  WorkerRelay relay = options.relay;
  if (encrypted || relay.asked()) {
    KVASIR_ASSIGN(identity, net::load_or_make_tls_identity(data_dir_of(options)));
    if (encrypted) {
      KVASIR_ASSIGN(server_options.tls, net::TlsContext::server(*identity));
    }
    KVASIR_TRY(prepare_relay(relay, *identity));
    if (relay.plain) server_options.raw_framing = true;
  }

  worker::StoreOptions store_options;
  store_options.device = options.device;
  store_options.bytes_max = options.memory_bytes;
  store_options.verify = !options.no_verify;
  if (options.only_that_layer) store_options.only_layer = options.layer;
  if (options.weights == "f32") store_options.packing = worker::Packing::kExpanded;
  else if (options.numerics == "fast") store_options.packing = worker::Packing::kInstead;
  else if (options.numerics == "any" && options.memory_bytes != 0) store_options.packing = worker::Packing::kBeside;
  KVASIR_ASSIGN(worker::SliceStore store, worker::SliceStore::load(options.slices, store_options));
  if (options.layer) KVASIR_TRY(worker::choose_raw_layer(store, options.layer));
  KVASIR_ASSIGN(ggml_backend_dev_t device, ffn::find_device(options.device));
  const int n_threads =
      options.n_threads > 0 ? options.n_threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  KVASIR_ASSIGN(auto engine, ffn::Engine::create({.device = options.device, .n_threads = n_threads}));
  KVASIR_ASSIGN(wire::NumericsId numerics_id, ffn::numerics_id(options.device));
  if (!options.no_tune) {
    KVASIR_ASSIGN(server_options.tuning, tune(options, store, *engine, n_threads));
  }

  const std::uint64_t bytes = store.bytes();
  const std::string packed = store.packed_bytes() == 0 ? "" : std::format(", {} of them rearranged for class fast", format_bytes(store.packed_bytes()));
  std::size_t n_experts = 0;
  for (const worker::HeldLayerPtr& layer : store.layers()) n_experts += layer->experts.size();
  const std::size_t n_layers = store.layers().size();
  KVASIR_ASSIGN(const std::unique_ptr<worker::Server> server,
                worker::Server::listen(where, std::move(store), ggml_backend_dev_buffer_type(device), std::move(engine), std::move(numerics_id),
                                       std::move(server_options)));
  KVASIR_ASSIGN(const auto metrics, serve_metrics(options.metrics, [raw = server.get()] { return raw->metrics(); }));
  if (metrics) spdlog::info("metrics on port {}", metrics->port());
  running = server.get();
  std::signal(SIGTERM, on_stop_signal);
  std::signal(SIGINT, on_stop_signal);

  std::unique_ptr<worker::RelayListener> at_relay;  // gone before the server
  if (relay.asked()) {
    KVASIR_ASSIGN(at_relay, listen_at_relay(relay, *identity, [&server](std::unique_ptr<net::Stream> stream, std::string peer) {
                    server->adopt(std::move(stream), std::move(peer));
                  }));
  }
  spdlog::info("{}", confined);
  std::printf("%s\n", link_line(where, server->port(), identity ? &*identity : nullptr, encrypted, relay).c_str());
  std::fflush(stdout);
  if (announcer) {
    discovery::Service service{.kind = discovery::Kind::kWorker,
                               .name = discovery::default_name(discovery::Kind::kWorker),
                               .host = where.host,
                               .port = server->port(),
                               .text = {{"version", KVASIR_VERSION}}};
    if (encrypted) service.text["fingerprint"] = net::format_fingerprint(identity->fingerprint);
    announcer->announce(service);
  }
  spdlog::info("serving {} experts of {} layers ({}{}) on {}, {} threads, numerics {}", n_experts, n_layers,
               format_bytes(bytes), packed, options.device, n_threads, options.numerics);
  const bool finished = server->run();
  running = nullptr;
  spdlog::info("stopped after {} requests", server->stats().requests.load());
  if (!finished) std::_Exit(kExitOk);  // a thread is still inside a long computation
  return finished;
}

int run(const Options& options) {
  const Result<bool> served = serve(options);
  return served ? kExitOk : report(served.error());
}

void add_common(CLI::App& command, Options& options) {
  command.add_option("--serve", options.serve, "[HOST:]PORT to listen on; loopback unless HOST is given, port 0 picks one")
      ->required();
  command.add_option("--threads", options.n_threads, "threads to compute with (default: one a core)")
      ->check(CLI::Range(1, ffn::kThreadsMax));
  command.add_option("--layer", options.layer, "the layer that peers of the older framing get");
  command.add_flag("--no-verify", options.no_verify, "do not compare the slices with their hashes");
  command.add_flag("-v,--verbose", options.log.verbose, "log every connection");
  add_log_options(command, options.log);
  add_confine_option(command, options.no_confine);
}

}  // namespace

void add_worker(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("worker", "Serve experts to backbones");
  add_common(*command, *options);
  auto* slice = command->add_option("--slice", options->slices, "slices (or whole models) to serve; none: an empty worker");
  auto* memory = command->add_option("--memory", options->memory_bytes, "bytes that experts may take (K, M, G); backbones may then upload some")
                     ->transform(CLI::AsSizeValue(false));
  command->add_option("--device", options->device, "ggml device to compute on, e.g. Vulkan0");
  command->add_option("--queue", options->queue, "requests that may wait; more are refused as busy")
      ->check(CLI::Range(0u, worker::kQueueMax));
  command->add_option("--queue-ms", options->queue_ms,
                      "time that requests ahead of a newcomer may take, as measured here; past that it is refused as "
                      "busy (0: any)")
      ->check(CLI::Range(0u, worker::kQueueMsMax));
  command->add_option("--piece-pairs", options->piece_pairs,
                      "uses of experts of a long request that are computed before their rows are sent (0: all)")
      ->check(CLI::Range(0u, wire::kExecPairsMax))
      ->capture_default_str();
  command->add_option("--spin-us", options->spin_us, "look for the next request this long before sleeping")
      ->check(CLI::Range(0u, worker::kSpinUsMax));
  command->add_option("--numerics", options->numerics,
                      "any: every class, with a rearranged second copy if --memory has room; exact: that one alone; fast: "
                      "one copy, rearranged, for backbones of class fast only")
      ->check(CLI::IsMember({"any", "exact", "fast"}))
      ->capture_default_str();
  command->add_option("--weights", options->weights,
                      "file: as the slice has them; f32: expanded when they are read, most accurate and 4 to 7 times as "
                      "large, for backbones of class fast only")
      ->check(CLI::IsMember({"file", "f32"}))
      ->capture_default_str();
  command->add_flag("--no-announce", options->no_announce, "do not announce this worker on the local network (mDNS)");
  command->add_flag("--no-tune", options->no_tune, "do not measure plans and speed at the start");
  command->add_flag("--tls", options->tls, "encrypt on loopback too");
  command->add_flag("--insecure", options->insecure, "plain TCP; with a token, also serve the older framing without it");
  command->add_flag("--insecure-anywhere", options->insecure_anywhere, "allow --insecure on addresses others can reach");
  command->add_option("--token-file", options->token_file, "node token peers must show (default: KVASIR_TOKEN)");
  command->add_option("--data", options->data_dir, "directory of this worker's certificate");
  add_relay_flags(*command, options->relay);
  command->add_option("--stats-file", options->stats_file, "JSON of counters, rewritten each second");
  command->add_option("--metrics", options->metrics, kMetricsHelp);
  command->callback([options, slice, memory, &exit_code] {
    if (slice->empty() && memory->empty())
      exit_code = report(fix_input("worker needs --slice FILE, or --memory BYTES to start empty.").error());
    else if (options->weights == "f32" && options->numerics == "exact")
      exit_code = report(fix_input("--weights f32 serves class fast only: leave out --numerics exact.").error());
    else
      exit_code = run(*options);
  });
}

std::optional<int> run_older_name(int argc, char** argv) {
  const std::string_view name = argc > 0 ? argv[0] : "";
  if (name.substr(name.rfind('/') + 1) != "linkcpp-expert-worker") return std::nullopt;
  Options options;
  CLI::App app{"Serves one layer's experts by the older framing. `kvasir worker` does more."};
  add_common(app, options);
  app.add_option("--model", options.slices, "slice or model")->required();
  CLI11_PARSE(app, argc, argv);
  options.insecure = true;
  options.numerics = "exact";
  options.only_that_layer = true;
  options.no_announce = true;
  return run(options);
}

}  // namespace kvasir::cli
