// Session grants: the hub's word to a worker that a backbone may use it for the next minutes.

#include <format>
#include <set>

#include "base/hex.h"
#include "hub/http/hub.h"
#include "hub/http/json_input.h"

namespace kvasir::hub {
namespace {

using nlohmann::json;

constexpr std::size_t kWorkersPerRequestMax = 1024;

// For those of the workers asked for that the hub knows; the others are left out.
Response grants(Hub& hub, const Request& request) {
  const auto input = JsonInput::parse(request.body);
  if (!input) return error_response(input.error());
  const auto key_text = input->text("public_key", 2 * sizeof(net::PublicKey));
  if (!key_text) return error_response(key_text.error());
  const auto key = from_hex(*key_text);
  net::Grant grant;
  if (!key || key->size() != grant.backbone_key.size())
    return error_response(400, "'public_key' must be 64 hexadecimal digits: an ed25519 key of this session.");
  std::ranges::copy(*key, grant.backbone_key.begin());
  const json* asked = input->find("workers");
  if (asked == nullptr || !asked->is_array() || asked->size() > kWorkersPerRequestMax)
    return error_response(400, std::format("'workers' must be a list of up to {} worker ids.", kWorkersPerRequestMax));
  std::set<std::string, std::less<>> wanted;
  for (const json& id : *asked) {
    if (!id.is_string()) return error_response(400, "'workers' must be a list of worker ids.");
    wanted.insert(id.get<std::string>());
  }
  grant.backbone = request.principal.token_id;
  grant.expires_unix_s = static_cast<std::uint64_t>(unix_now()) + hub.options().grant_life_s;
  json out = json::object();
  std::vector<std::pair<std::string, std::string>> known;  // id, model
  hub.with_market([&](Market& market) {
    market.for_each_node(request.now, [&](const NodeView& node) {
      if (wanted.contains(node.worker_id)) known.emplace_back(node.worker_id, node.model);
    });
  });
  for (auto& [id, model] : known) {
    if (hub.is_banned(id)) continue;
    grant.worker = id;
    grant.model = std::move(model);
    // A name too long for a grant: its worker is used by its ticket.
    if (const auto text = net::sign_grant(grant, hub.grant_key())) out[id] = *text;
  }
  Response response;
  response.text = dump({{"grants", out}, {"expires_in_s", hub.options().grant_life_s}});
  return response;
}

}  // namespace

void add_grant_routes(Router& router, Hub& hub) {
  router.add({.method = "GET",
              .pattern = "/api/grant-key",
              .summary = "The ed25519 key with which this hub signs session grants",
              .scopes = {},
              .query = {},
              .body_example = {},
              .answer_example = R"({"public_key":"00"})",
              .handler = [&hub](const Request&) {
                Response out;
                out.text = dump({{"public_key", to_hex(ByteSpan(hub.grant_key().public_key()))}});
                return out;
              }});
  router.add({.method = "POST",
              .pattern = "/api/expert-grants",
              .summary = "Session grants for workers, bound to a key of the backbone's",
              .scopes = {Scope::kBackbone},
              .query = {},
              .body_example = R"({"public_key":"00","workers":["laptop"]})",
              .answer_example = R"({"grants":{"laptop":"grant1.00.00"},"expires_in_s":600})",
              .handler = [&hub](const Request& request) { return grants(hub, request); }});
}

}  // namespace kvasir::hub
