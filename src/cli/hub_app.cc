#include "cli/hub_app.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <format>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/hex.h"
#include "cli/confine_option.h"
#include "cli/console.h"
#include "cli/hub_node.h"
#include "cli/log_format.h"
#include "discovery/announcer.h"
#include "hub/auth/secrets.h"
#include "hub/http/hub.h"
#include "hub/http/server.h"
#include "net/certificate_name.h"
#include "net/own_authority.h"
#include "net/relay_url.h"
#include "spdlog/spdlog.h"

namespace kvasir::cli {
namespace {

constexpr std::uint32_t kHeartbeatDefaultS = 10;
constexpr int kHeartbeatsMissed = 3;  // then a node is gone
constexpr auto kStopPatience = std::chrono::seconds(10);  // for requests under way

struct Options {
  std::string listen = "127.0.0.1:8080";
  std::string data_dir, models_dir, store_url, certificate, key, public_url;
  std::vector<std::string> names;  // of its own certificate
  bool no_proof = false, trust_proxy = false, public_view = false, no_announce = false, tls = false, no_confine = false;
  LogOptions log;
  std::uint32_t target = hub::MarketOptions{}.target;
  std::uint32_t experts_min = hub::MarketOptions{}.experts_min;
  std::uint32_t heartbeat_s = kHeartbeatDefaultS;
  // Of the subcommands:
  std::string scope = "worker", note, expires, id;
  std::int64_t pairs_per_day = 0;  // 0: no limit
  bool json = false;
};

Result<std::unique_ptr<hub::Store>> open_store(const Options& options) {
  std::string url = options.store_url;
  // A command line can be read by every user of the machine, and the URL may hold a password.
  if (const char* variable = std::getenv("KVASIR_HUB_STORE"); url.empty() && variable != nullptr) url = variable;
  if (url == "memory") return hub::make_memory_store();
  if (url.starts_with("postgres://") || url.starts_with("postgresql://")) return hub::open_postgres_store(url);
  if (!url.empty())
    return fix_input("--store takes postgres://USER@HOST/DATABASE, or 'memory'; leave it out for a file in --data.");
  if (options.data_dir.empty()) return fix_input("name the hub's folder: --data DIR.");
  return hub::open_sqlite_store(options.data_dir);
}

// As many connections as the system allows, rather than as many as it gives by default.
void raise_descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

// The certificate to serve with, if any: the one that was given, or one of the hub's own authority where
// the port is for others too.
Status choose_certificate(const Options& options, const net::HostPort& where, hub::ServerOptions& out) {
  out.certificate_file = options.certificate;
  out.key_file = options.key;
  if (!options.certificate.empty() || (!options.tls && net::is_loopback_host(where.host))) return {};
  std::vector<std::string> names = net::own_names();
  names.insert(names.end(), options.names.begin(), options.names.end());
  KVASIR_ASSIGN(const net::OwnCertificate made, net::make_own_certificate(options.data_dir, names));
  out.certificate_file = made.certificate_file;
  out.key_file = made.key_file;
  spdlog::info("HTTPS by a certificate of this hub's own; whoever joins needs --ca-file with a copy of {}",
               made.authority_file);
  return {};
}

// Something that can be pasted on another machine.
std::string shown_url(const hub::ServerOptions& options, std::uint16_t port) {
  net::HostPort shown{options.listen.host, port};
  if (shown.host == "0.0.0.0" || shown.host == "::") shown.host = net::own_address().value_or(shown.host);
  return std::format("{}://{}", options.certificate_file.empty() ? "http" : "https", net::format_host_port(shown));
}

std::string confine_hub(const Options& options, const discovery::Announcer* announcer) {
  Confinement files;
  files.keeps(options.data_dir);
  ::setenv("SQLITE_TMPDIR", options.data_dir.c_str(), /*overwrite=*/1);  // where large sorts go
  files.reads(options.models_dir);
  // Links in it lead to models elsewhere; where those of this moment lead is read, too.
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(options.models_dir, ignored))
    if (entry.is_symlink(ignored)) files.reads(std::filesystem::canonical(entry.path(), ignored).parent_path().string());
  for (const std::string* file : {&options.certificate, &options.key}) files.reads(*file);
  // libpq's own files.
  if (const char* home = std::getenv("HOME"); home != nullptr)
    for (const char* name : {"/.pgpass", "/.postgresql", "/.pg_service.conf"}) files.reads(home + std::string(name));
  if (announcer != nullptr) files.ends(announcer->child());
  return files.enforce(options.no_confine);
}

Status serve(const Options& options) {
  if (options.data_dir.empty()) return fix_input("name the hub's folder: --data DIR.");
  if (options.models_dir.empty()) return fix_input("name the folder of GGUF files that the hub serves: --models DIR.");
  if (options.certificate.empty() != options.key.empty()) return fix_input("--cert and --key go together.");
  ::umask(0077);
  raise_descriptor_limit();
  start_log("hub", options.log, "%H:%M:%S.%e %^%l%$ %v");
  // What listens on this machine alone is of no use to others.
  KVASIR_ASSIGN(const net::HostPort where, net::parse_host_port(options.listen, "127.0.0.1"));
  std::unique_ptr<discovery::Announcer> announcer;
  if (!options.no_announce && discovery::is_enabled() && !net::is_loopback_host(where.host)) {
    KVASIR_ASSIGN(announcer, discovery::Announcer::make());
  }
  std::signal(SIGPIPE, SIG_IGN);
  // Before the first thread, so that all of them leave these signals to sigwait below.
  sigset_t signals;
  sigemptyset(&signals);
  for (const int s : {SIGTERM, SIGINT}) sigaddset(&signals, s);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  const std::string confined = confine_hub(options, announcer.get());

  const auto log = [](const std::string& line) { spdlog::info("{}", line); };
  KVASIR_ASSIGN(auto store, open_store(options));
  hub::HubOptions hub_options;
  hub_options.data_dir = options.data_dir;
  hub_options.models_dir = options.models_dir;
  hub_options.market.proof = !options.no_proof;
  hub_options.market.target = options.target;
  hub_options.market.experts_min = options.experts_min;
  hub_options.market.heartbeat = std::chrono::seconds(options.heartbeat_s);
  hub_options.market.ttl = kHeartbeatsMissed * hub_options.market.heartbeat;
  hub_options.version = KVASIR_VERSION;
  hub_options.public_view = options.public_view;
  if (!options.public_url.empty()) {
    KVASIR_TRY(net::parse_relay_url(options.public_url));
    hub_options.public_url = options.public_url;
    while (hub_options.public_url.ends_with('/')) hub_options.public_url.pop_back();
  }
  KVASIR_ASSIGN(const auto hub, hub::Hub::create(std::move(hub_options), std::move(store), log));

  hub::ServerOptions server_options;
  server_options.listen = where;
  KVASIR_TRY(choose_certificate(options, where, server_options));
  server_options.trust_proxy = options.trust_proxy;
  KVASIR_ASSIGN(const auto server,
                hub::Server::start(server_options, hub->router(), hub->authenticator(), hub->relay_host(),
                                   log));
  spdlog::info("{}", confined);
  hub->set_server_stats([raw = server.get()] { return raw->stats(); });
  std::printf("%s\n", shown_url(server_options, server->port()).c_str());
  std::fflush(stdout);
  if (announcer)
    announcer->announce({.kind = discovery::Kind::kHub,
                         .name = discovery::default_name(discovery::Kind::kHub),
                         .host = where.host,
                         .port = server->port(),
                         // A certificate of its own names all its addresses, of which the seeker knows one.
                         .text = {{"version", KVASIR_VERSION}, {"name", net::certificate_name(options.certificate)}}});

  int signal = 0;
  ::sigwait(&signals, &signal);
  spdlog::info("stopping; requests under way may finish");
  // A second signal ends the process as usual.
  ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  server->stop(kStopPatience);
  hub->set_server_stats({});
  return {};
}

// "90m", "12h", "30d"
Result<hub::UnixSeconds> parse_duration(const std::string& text) {
  std::size_t used = 0;
  unsigned long long number = 0;
  try {
    number = std::stoull(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  const std::string unit = text.substr(std::min(used, text.size()));
  const hub::UnixSeconds scale = unit == "s" ? 1 : unit == "m" ? 60 : unit == "h" ? 3600 : unit == "d" ? 86'400 : 0;
  if (used == 0 || scale == 0 || number == 0 || number > 36'500 * 86'400ULL)
    return fix_input(std::format("'{}' is not a time; write it as 90m, 12h or 30d.", text));
  return static_cast<hub::UnixSeconds>(number) * scale;
}

Status token_create(const Options& options) {
  const auto scope = hub::parse_scope(options.scope);
  if (!scope)
    return fix_input(std::format("'{}' is no scope; it is worker, backbone, viewer or admin.", options.scope));
  std::optional<hub::UnixSeconds> expires;
  if (!options.expires.empty()) {
    KVASIR_ASSIGN(const auto life, parse_duration(options.expires));
    expires = hub::unix_now() + life;
  }
  KVASIR_ASSIGN(const auto store, open_store(options));
  hub::NewToken made = hub::make_token(*scope, options.note, expires, hub::unix_now());
  if (options.pairs_per_day > 0) {
    if (*scope != hub::Scope::kBackbone) return fix_input("--pairs-per-day is a limit of backbone tokens.");
    made.record.pairs_per_day = options.pairs_per_day;
  }
  KVASIR_TRY(store->put_token(made.record));
  std::printf("%s\n", made.text.c_str());
  return {};
}

std::string format_time(std::optional<hub::UnixSeconds> time) {
  return time ? std::format("{:%F %H:%M}", std::chrono::sys_seconds(std::chrono::seconds(*time))) : "-";
}

Status token_list(const Options& options) {
  KVASIR_ASSIGN(const auto store, open_store(options));
  KVASIR_ASSIGN(const auto tokens, store->list_tokens());
  if (options.json) {
    for (const hub::TokenRecord& t : tokens) {
      nlohmann::json line = {
          {"id", t.id}, {"scope", hub::to_string(t.scope)}, {"note", t.note}, {"created", t.created}};
      if (t.expires) line["expires"] = *t.expires;
      if (t.pairs_per_day) line["pairs_per_day"] = *t.pairs_per_day;
      if (t.revoked) line["revoked"] = *t.revoked;
      std::printf("%s\n", line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
    }
    return {};
  }
  std::printf("%-17s %-9s %-17s %-17s %-17s %s\n", "id", "scope", "created (UTC)", "expires", "revoked", "note");
  for (const hub::TokenRecord& t : tokens)
    std::printf("%-17s %-9s %-17s %-17s %-17s %s\n", t.id.c_str(), std::string(hub::to_string(t.scope)).c_str(),
                format_time(t.created).c_str(), format_time(t.expires).c_str(), format_time(t.revoked).c_str(),
                t.note.c_str());
  return {};
}

Status token_revoke(const Options& options) {
  // A whole token is taken too: its id is the middle part.
  std::string id = options.id;
  if (id.starts_with("kvasir_") && id.size() > 24) id = id.substr(7, 16);
  KVASIR_ASSIGN(const auto store, open_store(options));
  KVASIR_ASSIGN(const bool known, store->revoke_token(id, hub::unix_now()));
  if (!known) return fix_input(std::format("there is no token with the id '{}'; see kvasir-hub token list.", id));
  return {};
}

Status key_admit(const Options& options) {
  const auto scope = hub::parse_scope(options.scope);
  if (!scope || (*scope != hub::Scope::kWorker && *scope != hub::Scope::kBackbone))
    return fix_input("a key is admitted as worker or backbone.");
  const auto key = from_hex(options.id);
  if (!key || key->size() != hub::kEd25519KeyBytes)
    return fix_input("the key must be 64 hexadecimal digits: an ed25519 public key.");
  KVASIR_ASSIGN(const auto store, open_store(options));
  return store->put_key({to_hex(*key), *scope, options.note, hub::unix_now(), std::nullopt});
}

Status key_list(const Options& options) {
  KVASIR_ASSIGN(const auto store, open_store(options));
  KVASIR_ASSIGN(const auto keys, store->list_keys());
  for (const hub::KeyRecord& k : keys)
    std::printf("%s %-9s %s%s %s\n", k.public_key.c_str(), std::string(hub::to_string(k.scope)).c_str(),
                format_time(k.created).c_str(), k.revoked ? " (revoked)" : "", k.note.c_str());
  return {};
}

Status key_revoke(const Options& options) {
  KVASIR_ASSIGN(const auto store, open_store(options));
  KVASIR_ASSIGN(const bool known, store->revoke_key(options.id, hub::unix_now()));
  if (!known) return fix_input("this key was never admitted; see kvasir-hub key list.");
  return {};
}

Status check(const Options& options) {
  KVASIR_ASSIGN(const auto store, open_store(options));
  KVASIR_TRY(store->check());
  std::printf("the store is sound\n");
  return {};
}

}  // namespace

void configure_hub(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  const auto add_store = [options](CLI::App* command) {
    command->add_option("--data", options->data_dir, "folder of the hub's database and caches");
    command->add_option("--store", options->store_url,
                        "postgres://USER@HOST/DATABASE instead of a file in --data (or KVASIR_HUB_STORE)");
  };
  const auto add = [&](CLI::App* parent, const char* name, const char* what, Status (*act)(const Options&)) {
    CLI::App* command = parent->add_subcommand(name, what);
    add_store(command);
    command->callback([options, act, &exit_code] { exit_code = report(act(*options)); });
    return command;
  };

  add_store(&app);
  app.add_option("--listen", options->listen, "HOST:PORT; plain HTTP on loopback, HTTPS elsewhere; port 0 picks one")
      ->capture_default_str();
  app.add_option("--models", options->models_dir, "folder of GGUF files; nothing outside is served");
  app.add_option("--cert", options->certificate, "PEM file of the certificate chain (default: one by an authority of the hub's own, DATA/hub-ca.pem)");
  app.add_option("--key", options->key, "PEM file of its private key");
  app.add_flag("--tls", options->tls, "HTTPS on loopback too; elsewhere it always is");
  app.add_option("--name", options->names,
                 "a further name under which this hub is reached, for the certificate of its own (may be repeated)");
  app.add_flag("--trust-proxy", options->trust_proxy,
               "take client addresses from X-Forwarded-For of a proxy on this machine");
  app.add_option("--public-url", options->public_url,
                 "https:// address of this very hub, where several share a --store: backbones are sent where their worker waits");
  app.add_flag("--no-proof", options->no_proof, "count what nodes claim without asking for proof: for a closed group");
  app.add_flag("--no-announce", options->no_announce, "do not announce this hub on the local network (mDNS)");
  app.add_flag("--public-view", options->public_view,
               "show the dashboard to everybody, without a token: coverage, workers by name, traffic; no addresses");
  app.add_option("--target", options->target, "replicas that every expert should have")
      ->check(CLI::Range(1u, hub::kTargetMax))
      ->capture_default_str();
  app.add_option("--min-experts", options->experts_min, "the smallest slice that is of use")
      ->check(CLI::Range(1u, 65'536u))
      ->capture_default_str();
  app.add_option("--heartbeat", options->heartbeat_s, "seconds between two heartbeats of a node; after three without it is gone")
      ->check(CLI::Range(1u, 60u))
      ->capture_default_str();
  app.add_flag("-v,--verbose", options->log.verbose, "log more");
  add_log_options(app, options->log);
  add_confine_option(app, options->no_confine);

  CLI::App* token = app.add_subcommand("token", "Node tokens")->require_subcommand(1);
  CLI::App* create = add(token, "create", "Make a token; it is printed once and kept only as a hash", token_create);
  create->add_option("--scope", options->scope, "worker, backbone, viewer (looks only) or admin")
      ->capture_default_str();
  create->add_option("--expires", options->expires, "how long it is good: 12h, 30d (default: for ever)");
  create->add_option("--pairs-per-day", options->pairs_per_day,
                     "of a backbone: uses of an expert by a token that it may have computed (default: no limit)")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 50));
  create->add_option("--note", options->note, "for your own memory");
  add(token, "list", "Tokens, without their secrets", token_list)
      ->add_flag("--json", options->json, "one JSON object a line");
  add(token, "revoke", "End a token; running hubs notice within seconds", token_revoke)
      ->add_option("id", options->id, "its id")
      ->required();

  CLI::App* key = app.add_subcommand("key", "ed25519 keys whose holders may fetch tokens")->require_subcommand(1);
  CLI::App* admit = add(key, "admit", "Admit a public key", key_admit);
  admit->add_option("key", options->id, "64 hexadecimal digits")->required();
  admit->add_option("--scope", options->scope, "worker or backbone")->capture_default_str();
  admit->add_option("--note", options->note, "for your own memory");
  add(key, "list", "Admitted keys", key_list);
  add(key, "revoke", "Admit a key no more; tokens it fetched live on until they expire", key_revoke)
      ->add_option("key", options->id, "the public key")
      ->required();

  configure_hub_nodes(app, exit_code);
  add(&app, "check", "Check the database", check);

  app.require_subcommand(0, 1);
  app.callback([&app, options, &exit_code] {
    if (app.get_subcommands().empty()) exit_code = report(serve(*options));
  });
}

}  // namespace kvasir::cli
