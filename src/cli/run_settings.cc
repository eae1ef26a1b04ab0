#include "cli/run_settings.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <format>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>

#include "base/hex.h"
#include "cli/lan.h"
#include "cli/node_token.h"
#include "dispatch/dispatcher.h"
#include "ffn/brief_waits.h"
#include "gguf/moe_model.h"
#include "hub/client/hub_client.h"

namespace kvasir::cli {
namespace {

constexpr const char* kDefaultListen = "127.0.0.1:8080";

std::optional<std::string> environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? std::optional<std::string>(value) : std::nullopt;
}

bool has_any(const std::vector<std::string>& args, std::initializer_list<std::string_view> names) {
  return std::ranges::any_of(args, [&](const std::string& arg) { return std::ranges::find(names, arg) != names.end(); });
}

// llama-server takes the last of several.
std::optional<std::string> last_value(const std::vector<std::string>& args, std::initializer_list<std::string_view> names) {
  std::optional<std::string> out;
  for (std::size_t i = 0; i + 1 < args.size(); ++i)
    if (std::ranges::find(names, args[i]) != names.end()) out = args[i + 1];
  return out;
}

// An address can be bound to only where it is.
bool is_this_machine(const std::string& host) {
  if (host.empty()) return false;  // reached through a relay alone
  const auto addresses = net::resolve({host, 0});
  if (!addresses) return false;
  return std::ranges::any_of(*addresses, [](const net::Address& address) {
    const net::Fd probe(::socket(address.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    return probe && ::bind(probe.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.length) == 0;
  });
}

Result<std::string> token_of(const RunOptions& options) {
  if (!options.token.empty()) return options.token;
  return read_node_token(options.token_file);
}

// The hosts of the workers that the hub names for this model now.
Result<std::set<std::string>> ask_hub(const hub::HubAddress& address, const gguf::MoeModel& model, RunSettings& out) {
  KVASIR_ASSIGN(const auto client, hub::HubClient::create(address));
  KVASIR_ASSIGN(const gguf::LayerId id, model.layer_id(model.layers().front()));
  KVASIR_ASSIGN(const hub::HubReply layer, client->get("/api/layers?id=" + to_hex(id)));
  if (layer.status == 404)
    return fix_input(std::format("the hub serves no model with the experts of '{}'; run the very file that it serves.",
                                 model.file_name()));
  if (layer.status != 200) return fix_input(layer.error());
  const nlohmann::json named = layer.json();
  const std::string name = named.contains("model") && named["model"].is_string() ? named["model"].get<std::string>() : "";
  KVASIR_ASSIGN(const hub::HubReply routes, client->get("/api/expert-routes?model=" + name));
  if (routes.status == 503) {
    out.notes.push_back("the hub has just started; its workers follow.");
    return std::set<std::string>{};
  }
  if (routes.status != 200) return fix_input(routes.error());
  std::set<std::string> hosts;
  std::size_t n = 0;
  const nlohmann::json table = routes.json();
  if (const auto workers = table.find("workers"); workers != table.end() && workers->is_array())
    for (const auto& worker : *workers) {
      ++n;
      if (!worker.is_object() || !worker.contains("url") || !worker["url"].is_string()) continue;
      if (const auto where = dispatch::parse_worker(worker["url"].get<std::string>())) hosts.insert(where->host);
    }
  out.notes.push_back(std::format("the hub knows this model as '{}'; {} workers serve it now.", name, n));
  return hosts;
}

// Who computes the experts; the hosts, as far as they are known.
Result<std::set<std::string>> decide_workers(const RunOptions& options, const gguf::MoeModel& model, RunSettings& out) {
  if (!options.hub.empty() && !options.workers.empty())
    return fix_input("--hub and --workers both say who computes the experts; give one of them.");
  std::string hub = !options.hub.empty()       ? options.hub
                    : !options.workers.empty() ? std::string()
                                               : environment("KVASIR_HUB").value_or("");
  const std::string workers = !options.workers.empty() ? options.workers
                              : !hub.empty()           ? std::string()
                                                       : environment("KVASIR_WORKERS").value_or("");
  KVASIR_ASSIGN(const std::string token, token_of(options));
  if (!token.empty()) out.environment["KVASIR_TOKEN"] = token;
  const std::string ca_file = !options.ca_file.empty() ? options.ca_file : environment("KVASIR_HUB_CA").value_or("");
  const bool elsewhere = environment("KVASIR_CONFIG") || environment("KVASIR_LOCAL") == "only";
  if (hub.empty() && workers.empty() && !elsewhere) {
    auto found = find_hub(ca_file);
    if (!found)
      return fix_input(std::format("say who computes the experts: --hub URL, or --workers LINK,LINK,… as the workers "
                                   "print them ({})",
                                   found.error().message));
    hub = *std::move(found);
  }
  if (!hub.empty()) {
    KVASIR_ASSIGN(const hub::HubAddress address, hub::check_address({hub, token, ca_file}));
    out.environment["KVASIR_HUB"] = address.url;
    if (!ca_file.empty()) out.environment["KVASIR_HUB_CA"] = ca_file;
    out.unset.emplace_back("KVASIR_WORKERS");
    return ask_hub(address, model, out);
  }
  out.unset.emplace_back("KVASIR_HUB");
  if (workers.empty()) return std::set<std::string>{};
  out.environment["KVASIR_WORKERS"] = workers;
  // Workers that are named, offer memory and hold nothing are of no use without.
  if (!environment("KVASIR_UPLOAD") && model.kind() != gguf::FileKind::kBackbone) out.environment["KVASIR_UPLOAD"] = "1";
  KVASIR_ASSIGN(const auto parsed, dispatch::parse_workers(workers));
  std::set<std::string> hosts;
  for (const dispatch::WorkerAddress& worker : parsed) hosts.insert(worker.host);
  return hosts;
}

// Where llama-server listens: as its own flags or variables say, else as ours do.
Status decide_listen(const RunOptions& options, RunSettings& out) {
  KVASIR_ASSIGN(const net::HostPort ours, net::parse_host_port(options.listen.empty() ? kDefaultListen : options.listen, "127.0.0.1"));
  auto host = last_value(options.extra, {"--host"});
  auto port = last_value(options.extra, {"--port"});
  if (!host && options.listen.empty()) host = environment("LLAMA_ARG_HOST");
  if (!port && options.listen.empty()) port = environment("LLAMA_ARG_PORT");
  if (!host) {
    host = ours.host;
    out.args.insert(out.args.end(), {"--host", *host});
  }
  if (host->ends_with(".sock")) {
    out.socket = *host;
    return {};
  }
  if (!port) {
    port = std::to_string(ours.port);
    out.args.insert(out.args.end(), {"--port", *port});
  }
  host = host->substr(0, host->find(','));
  KVASIR_ASSIGN(out.listen, net::parse_host_port(*port, *host));
  if (out.listen.port == 0) return fix_input("llama-server needs a port; give --listen [HOST:]PORT.");
  // llama-server says this at the end of many lines.
  KVASIR_TRY(net::listen_on(out.listen));
  return {};
}

}  // namespace

Result<RunSettings> decide_run(const RunOptions& options) {
  RunSettings out;
  KVASIR_ASSIGN(const gguf::MoeModel model, gguf::MoeModel::open(options.model));
  KVASIR_TRY(model.require_experts());
  if (model.kind() == gguf::FileKind::kSlice)
    return fix_input(std::format("'{}' is a slice; it is for kvasir worker. Run the model it was cut from.", options.model));
  const auto& extra = options.extra;
  out.args = {"-m", options.model};
  KVASIR_ASSIGN(const std::set<std::string> hosts, decide_workers(options, model, out));
  KVASIR_TRY(decide_listen(options, out));

  const auto choose = [&](const char* name, const std::string& given) {
    if (!given.empty()) out.environment[name] = given;
  };
  choose("KVASIR_NUMERICS", options.numerics);
  choose("KVASIR_LOCAL", options.local);
  choose("KVASIR_REPLICA", options.replica);
  std::string replica = !options.replica.empty() ? options.replica : environment("KVASIR_REPLICA").value_or("");
  if (replica.empty() && model.kind() == gguf::FileKind::kBackbone) {
    out.environment["KVASIR_REPLICA"] = replica = "none";
    out.notes.push_back("the file holds no experts, so none can be computed here (KVASIR_REPLICA=none).");
  }
  // Where no expert is kept, llama.cpp need not map the holes in their place.
  if (replica == "none" && !has_any(extra, {"-lm", "--load-mode", "--mmap", "--no-mmap", "-dio", "--direct-io"}))
    out.args.insert(out.args.end(), {"-lm", "dio"});
  const std::string numerics = !options.numerics.empty() ? options.numerics : environment("KVASIR_NUMERICS").value_or("exact");
  if (numerics != "fast" && !has_any(extra, {"--repack", "--no-repack", "-nr"})) out.args.emplace_back("--no-repack");
  // The warm-up uses all experts of each layer once: much traffic for nothing.
  if (!has_any(extra, {"--warmup", "--no-warmup"})) out.args.emplace_back("--no-warmup");
  // With a GPU, dense layers go there and experts still to the plugin; without one it says nothing new.
  if (!has_any(extra, {"-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe", "-ot", "--override-tensor"}))
    out.args.emplace_back("--cpu-moe");
  // ggml's threads spin while they wait, and would take the cores from workers beside them.
  if (!environment(ffn::kWaitPolicyVariable) && !environment(ffn::kSpinCountVariable) && std::ranges::any_of(hosts, is_this_machine)) {
    ffn::add_brief_waits(out.environment);
    out.notes.push_back(std::format("workers share this machine, so llama.cpp's threads wait briefly, then sleep ({}={}).",
                                    ffn::kSpinCountVariable, ffn::kBriefSpinCount));
  }
  if (has_any(extra, {"--ssl-cert-file"})) out.scheme = "https";
  out.prefix = last_value(extra, {"--api-prefix"}).value_or("");
  out.args.insert(out.args.end(), extra.begin(), extra.end());
  return out;
}

}  // namespace kvasir::cli
