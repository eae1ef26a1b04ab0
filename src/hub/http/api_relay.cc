// The relay's place in the API; its sockets live in hub/relay.

#include "hub/http/hub.h"

namespace kvasir::hub {

Result<bool> RelayHostOfHub::may_serve(const std::string& session, const std::string& token_id) {
  return hub_.owns_worker(session, token_id);
}

bool RelayHostOfHub::is_banned(const std::string& session) { return hub_.is_banned(session); }

void RelayHostOfHub::waits_here(const std::string& session) {
  const std::string& own = hub_.options().public_url;
  if (own.empty()) return;
  const auto known = hub_.store().find_relay_session(session);
  if (known && *known == own) return;
  // Not worth a refusal: backbones that ask here are served all the same.
  if (const Status put = hub_.store().put_relay_session(session, own, unix_now()); !put) hub_.log_error(put.error());
}

std::string RelayHostOfHub::waits_elsewhere(const std::string& session) {
  const std::string& own = hub_.options().public_url;
  if (own.empty()) return {};
  const auto known = hub_.store().find_relay_session(session);
  return known && *known && **known != own ? **known : std::string();
}

// A direction is a side of the ledger: the relay's own count beside what the two ends say.
Status RelayHostOfHub::record(const std::vector<RelayUse>& uses) {
  const std::int64_t day = unix_now() / 86'400;
  std::vector<Contribution> entries;
  for (const RelayUse& use : uses) {
    const auto add = [&](Side side, std::uint64_t bytes) {
      if (bytes == 0) return;
      Contribution entry;
      entry.day = day;
      entry.worker_id = use.session;
      entry.reporter = use.backbone;
      entry.side = side;
      entry.bytes = static_cast<std::int64_t>(bytes);
      entries.push_back(std::move(entry));
    };
    add(Side::kRelayToWorker, use.to_worker_bytes);
    add(Side::kRelayToBackbone, use.to_backbone_bytes);
  }
  KVASIR_TRY(hub_.store().add_contributions(entries, {}, unix_now()));
  return {};
}

void add_relay_routes(Router& router) {
  router.add({.method = "GET",
              .pattern = "/api/expert-relay",
              .summary = "WebSocket: a worker's token waits under the session, a backbone's is joined to that worker; "
                         "binary messages pass both ways",
              .scopes = {Scope::kWorker, Scope::kBackbone},
              .query = {{"session", "the worker's id", true},
                        {"role", "worker or backbone, for an admin's token", false},
                        {"token", "for older clients that cannot set the Authorization header", false}},
              .body_example = {},
              .answer_example = {},
              .handler =
                  [](const Request&) {
                    Response out = error_response(426, "this address speaks WebSocket only.");
                    out.headers.emplace_back("Upgrade", "websocket");
                    return out;
                  },
              .websocket = true});
}

}  // namespace kvasir::hub
