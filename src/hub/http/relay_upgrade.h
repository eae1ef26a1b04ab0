// From an HTTP request to a WebSocket of the relay. Inside the server only.
#pragma once

#include <optional>

#include "hub/http/shared.h"
#include "hub/relay/relay.h"

namespace kvasir::hub {

// Who dials: by its token, and by `role` for an admin's, which may be either.
inline std::optional<Scope> relay_role(const Request& request) {
  const auto said = request.query.find("role");
  const std::optional<Scope> role = said == request.query.end() ? std::nullopt : parse_scope(said->second);
  const Scope scope = request.principal.scope;
  if (said == request.query.end() && scope != Scope::kAdmin) return scope;
  if (!role || *role == Scope::kAdmin || !permits(scope, *role)) return std::nullopt;
  return role;
}

// A refusal, or nothing: then `stream` has been moved to the relay (or its peer is gone).
template <typename Stream>
asio::awaitable<std::optional<Response>> hand_to_relay(Stream& stream, const End::Request& message, const Request& request,
                                                       std::shared_ptr<Shared> shared) {
  const auto named = request.query.find("session");
  if (named == request.query.end() || !is_session_name(named->second))
    co_return error_response(400, "'session' must be the worker's id: letters, digits and . _ - : @.");
  const std::string session = named->second;
  const std::optional<Scope> role = relay_role(request);
  if (!role) co_return error_response(403, "'role' must be worker or backbone, as the token allows.");
  const std::string token_id = request.principal.token_id;
  const std::shared_ptr<Relay> relay = shared->relay;
  if (*role == Scope::kWorker) {
    auto refusal = co_await run_on(shared->handlers, [relay, session, token_id] {
      return relay->refuse_worker(session, token_id);
    });
    if (refusal) co_return error_response(refusal->status, refusal->sentence);
    const std::shared_ptr<End> end = make_end(std::move(stream));
    if (!co_await end->accept(message)) relay->add_worker(end, session, token_id);
    co_return std::nullopt;
  }
  const std::string elsewhere = co_await run_on(shared->handlers, [relay, session] { return relay->find_elsewhere(session); });
  if (!elsewhere.empty()) {
    Response moved = error_response(307, std::format("the worker '{}' waits at another hub, {}; ask there.", session, elsewhere));
    moved.headers.emplace_back("Location", elsewhere + std::string(message.target()));
    co_return moved;
  }
  RelayRefusal refusal;
  RelaySlotPtr worker = co_await relay->take_worker(session, token_id, refusal);
  if (worker == nullptr) co_return error_response(refusal.status, refusal.sentence);
  // The 101 tells the backbone that its worker is there.
  const std::shared_ptr<End> end = make_end(std::move(stream));
  if (co_await end->accept(message)) relay->give_up(std::move(worker));
  else relay->join(std::move(worker), end);
  co_return std::nullopt;
}

}  // namespace kvasir::hub
