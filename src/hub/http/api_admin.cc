// The operator's view: nodes, bans, evictions.

#include <format>

#include "hub/http/hub.h"
#include "hub/http/json_input.h"

namespace kvasir::hub {
namespace {

using nlohmann::json;

Response ok(const json& value) {
  Response out;
  out.text = dump(value);
  return out;
}

Response nodes(Hub& hub, const Request& request) {
  json out = json::array();
  hub.with_market([&](Market& market) {
    market.advance(request.now);
    market.for_each_node(request.now, [&](const NodeView& node) {
      out.push_back({{"worker_id", node.worker_id},
                     {"token_id", node.owner},
                     {"model", node.model},
                     {"url", node.url},
                     {"experts_claimed", node.experts_claimed},
                     {"experts_counted", count_experts(node.counted)},
                     {"capacity", node.capacity_bytes},
                     {"speed", node.speed_rows_per_s},
                     {"draining", node.draining},
                     {"moving", node.moving},
                     {"seen_s_ago", std::chrono::duration<double>(node.since_seen).count()}});
    });
  });
  return ok({{"nodes", out}});
}

// Reads worker_id, then does `act`.
template <typename Act>
Response on_worker(const Request& request, const Act& act) {
  const auto input = JsonInput::parse(request.body);
  if (!input) return error_response(input.error());
  const auto id = input->text("worker_id", 128);
  if (!id) return error_response(id.error());
  return act(*input, *id);
}

}  // namespace

void add_admin_routes(Router& router, Hub& hub) {
  const std::vector<Scope> admin = {Scope::kAdmin};
  router.add(
      {.method = "GET",
       .pattern = "/api/admin/nodes",
       .summary = "Every node that the hub knows",
       .scopes = admin,
       .query = {},
       .body_example = {},
       .answer_example =
           R"({"nodes":[{"worker_id":"laptop","token_id":"00","model":"qwen","url":"192.0.2.7:7000",
                "experts_claimed":16,
                "experts_counted":16,"capacity":340000000,"speed":1200.5,"draining":false,"moving":false,
                "seen_s_ago":3.5}]})",
       .handler = [&hub](const Request& request) { return nodes(hub, request); }});
  router.add({.method = "POST",
              .pattern = "/api/admin/evict",
              .summary = "Forget a node; it may come back",
              .scopes = admin,
              .query = {},
              .body_example = R"({"worker_id":"laptop"})",
              .answer_example = R"({"ok":true,"known":true})",
              .handler = [&hub](const Request& request) {
                return on_worker(request, [&](const JsonInput&, const std::string& id) {
                  const bool known =
                      hub.with_market([&](Market& market) { return market.remove_node(id, request.now); });
                  return ok({{"ok", true}, {"known", known}});
                });
              }});
  router.add({.method = "POST",
              .pattern = "/api/admin/ban",
              .summary = "Forget a node and refuse it from now on",
              .scopes = admin,
              .query = {},
              .body_example = R"({"worker_id":"laptop","reason":"wrong answers"})",
              .answer_example = R"({"ok":true})",
              .handler = [&hub](const Request& request) {
                return on_worker(request, [&](const JsonInput& input, const std::string& id) {
                  const auto reason = input.optional_text("reason", 256);
                  if (!reason) return error_response(reason.error());
                  if (const Status put = hub.store().put_ban({id, reason->value_or(""), unix_now()}); !put)
                    return error_response(put.error());
                  hub.read_bans();
                  return ok({{"ok", true}});
                });
              }});
  router.add({.method = "GET",
              .pattern = "/api/admin/bans",
              .summary = "Nodes that are banned",
              .scopes = admin,
              .query = {},
              .body_example = {},
              .answer_example = R"({"bans":[{"worker_id":"laptop","reason":"wrong answers","since":1767225600}]})",
              .handler = [&hub](const Request&) {
                const auto bans = hub.store().list_bans();
                if (!bans) return error_response(bans.error());
                json out = json::array();
                for (const BanRecord& ban : *bans)
                  out.push_back({{"worker_id", ban.worker_id}, {"reason", ban.reason}, {"since", ban.created}});
                return ok({{"bans", out}});
              }});
  router.add({.method = "POST",
              .pattern = "/api/admin/unban",
              .summary = "Lift a ban",
              .scopes = admin,
              .query = {},
              .body_example = R"({"worker_id":"laptop"})",
              .answer_example = R"({"ok":true,"known":true})",
              .handler = [&hub](const Request& request) {
                return on_worker(request, [&](const JsonInput&, const std::string& id) {
                  const auto removed = hub.store().remove_ban(id);
                  if (!removed) return error_response(removed.error());
                  hub.read_bans();
                  return ok({{"ok", true}, {"known", *removed}});
                });
              }});
}

}  // namespace kvasir::hub
