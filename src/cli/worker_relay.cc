#include "cli/worker_relay.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cctype>
#include <format>

#include "cli/node_token.h"
#include "spdlog/spdlog.h"

namespace kvasir::cli {
namespace {

constexpr std::size_t kHostBytesMax = 64;  // of the machine's name in the session's

}  // namespace

void add_relay_flags(CLI::App& command, WorkerRelay& relay) {
  command.add_option("--relay", relay.url, "https://HOST of a hub through which backbones reach this machine, too");
  command.add_option("--relay-name", relay.name, "name to wait under there (default: this machine's and its key's)");
  command.add_option("--relay-ca", relay.ca_file, "PEM certificate of a hub that signed its own");
  command.add_option("--relay-token-file", relay.token_file, "this node's token of that hub (default: KVASIR_RELAY_TOKEN)");
  command.add_flag("--relay-plain", relay.plain,
                   "for backbones of the older framing: what passes the relay is not encrypted between the ends");
}

Status prepare_relay(WorkerRelay& relay, const net::TlsIdentity& identity) {
  if (!relay.name.empty()) return {};
  char host[kHostBytesMax + 1] = {};
  if (::gethostname(host, sizeof host - 1) != 0 || host[0] == '\0') std::snprintf(host, sizeof host, "worker");
  for (char& c : host)
    if (c != '\0' && std::isalnum(static_cast<unsigned char>(c)) == 0) c = '-';
  relay.name = std::format("{}-{}", host, net::format_fingerprint(identity.fingerprint).substr(0, 8));
  return {};
}

std::string relay_address(const WorkerRelay& relay) { return "relay:" + relay.name; }

Result<std::unique_ptr<worker::RelayListener>> listen_at_relay(
    const WorkerRelay& relay, const net::TlsIdentity& identity,
    std::function<void(std::unique_ptr<net::Stream>, std::string)> accept) {
  KVASIR_ASSIGN(const std::string token, read_node_token(relay.token_file, "KVASIR_RELAY_TOKEN"));
  KVASIR_ASSIGN(net::RelayDialer dialer,
                net::RelayDialer::create({.url = relay.url, .token = token, .ca_file = relay.ca_file}));
  std::optional<net::TlsContext> tls;
  if (!relay.plain) {
    KVASIR_ASSIGN(tls, net::TlsContext::server(identity));
  }
  return std::make_unique<worker::RelayListener>(
      worker::RelayListenerOptions{.dialer = std::move(dialer),
                                   .session = relay.name,
                                   .tls = std::move(tls),
                                   .accept = std::move(accept),
                                   .log = [](const std::string& line) { spdlog::info("{}", line); }});
}

}  // namespace kvasir::cli
