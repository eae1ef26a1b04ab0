#include "cli/hub_node.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <format>
#include <memory>

#include "base/error.h"
#include "cli/console.h"
#include "cli/node_token.h"
#include "hub/client/hub_client.h"

namespace kvasir::cli {
namespace {

using nlohmann::json;

struct Options {
  std::string url = "http://127.0.0.1:8080", token_file, ca_file;
  std::string worker_id, reason;
  bool json = false;
};

Result<json> ask(const Options& options, const std::string& path, const json* body) {
  KVASIR_ASSIGN(const std::string token, read_node_token(options.token_file));
  if (token.empty())
    return fix_input(
        "an admin's token is needed: set KVASIR_TOKEN, or give --token-file; kvasir-hub token create "
        "--scope admin makes one.");
  KVASIR_ASSIGN(const hub::HubAddress address, hub::check_address({options.url, token, options.ca_file}));
  KVASIR_ASSIGN(const auto client, hub::HubClient::create(address));
  KVASIR_ASSIGN(const hub::HubReply reply, body == nullptr ? client->get(path) : client->post(path, *body));
  if (reply.status != 200) return fix_input(reply.error());
  return reply.json();
}

std::string text_of(const json& object, const char* name) { return object.value(name, std::string()); }

Status list(const Options& options) {
  KVASIR_ASSIGN(const json nodes, ask(options, "/api/admin/nodes", nullptr));
  KVASIR_ASSIGN(const json bans, ask(options, "/api/admin/bans", nullptr));
  const auto list_of = [](const json& answer, const char* name) {
    const json found = answer.value(name, json::array());
    return found.is_array() ? found : json::array();
  };
  if (options.json) {
    for (const json& node : list_of(nodes, "nodes")) std::printf("%s\n", node.dump().c_str());
    for (json ban : list_of(bans, "bans")) {
      ban["banned"] = true;
      std::printf("%s\n", ban.dump().c_str());
    }
    return {};
  }
  std::printf("%-32s %-17s %-20s %9s %8s  %s\n", "node", "token", "model", "experts", "seen", "state");
  for (const json& node : list_of(nodes, "nodes")) {
    const std::uint64_t counted = node.value("experts_counted", std::uint64_t{0});
    const std::uint64_t claimed = node.value("experts_claimed", std::uint64_t{0});
    const char* state = node.value("draining", false) ? "draining"
                        : node.value("moving", false) ? "moving"
                        : counted < claimed           ? "proving"
                                                      : "serving";
    std::printf("%-32s %-17s %-20s %9llu %6.0f s  %s\n", text_of(node, "worker_id").c_str(),
                text_of(node, "token_id").c_str(), text_of(node, "model").c_str(),
                static_cast<unsigned long long>(counted), node.value("seen_s_ago", 0.0), state);
  }
  for (const json& ban : list_of(bans, "bans"))
    std::printf("%-32s %-17s %-20s %9s %8s  banned%s%s\n", text_of(ban, "worker_id").c_str(), "-", "-", "-", "-",
                text_of(ban, "reason").empty() ? "" : ": ", text_of(ban, "reason").c_str());
  return {};
}

Status act(const Options& options, const char* path, bool must_be_known) {
  json body = {{"worker_id", options.worker_id}};
  if (!options.reason.empty()) body["reason"] = options.reason;
  KVASIR_ASSIGN(const json answer, ask(options, path, &body));
  if (must_be_known && !answer.value("known", true))
    return fix_input(
        std::format("the hub knows no such node or ban as '{}'; see kvasir-hub node list.", options.worker_id));
  return {};
}

Status ban(const Options& options) { return act(options, "/api/admin/ban", false); }
Status unban(const Options& options) { return act(options, "/api/admin/unban", true); }
Status evict(const Options& options) { return act(options, "/api/admin/evict", true); }

}  // namespace

void configure_hub_nodes(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* node = app.add_subcommand("node", "The nodes of a running hub, with an admin's token (KVASIR_TOKEN)")
                       ->require_subcommand(1);
  const auto add = [&](const char* name, const char* what, Status (*run)(const Options&)) {
    CLI::App* command = node->add_subcommand(name, what);
    command->add_option("--url", options->url, "address of the hub")->capture_default_str();
    command->add_option("--token-file", options->token_file, "file with the admin's token, instead of KVASIR_TOKEN");
    command->add_option("--ca-file", options->ca_file, "PEM certificate to trust, of a hub that signed its own");
    command->callback([options, run, &exit_code] { exit_code = report(run(*options)); });
    return command;
  };
  add("list", "Nodes that the hub knows, and those that are banned", list)
      ->add_flag("--json", options->json, "one JSON object a line");
  CLI::App* banned = add("ban", "Forget a node and refuse it from now on", ban);
  banned->add_option("--reason", options->reason, "for your own memory");
  for (CLI::App* command : {banned, add("unban", "Let a banned node come again", unban),
                            add("evict", "Forget a node; it may come back", evict)})
    command->add_option("node", options->worker_id, "its worker id")->required();
}

}  // namespace kvasir::cli
