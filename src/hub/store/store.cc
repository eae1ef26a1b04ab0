#include "hub/store/store.h"

#include <chrono>

namespace kvasir::hub {

UnixSeconds unix_now() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string_view to_string(Scope scope) {
  switch (scope) {
    case Scope::kWorker: return "worker";
    case Scope::kViewer: return "viewer";
    case Scope::kBackbone: return "backbone";
    case Scope::kAdmin: return "admin";
  }
  return "unknown";
}

std::optional<Scope> parse_scope(std::string_view text) {
  for (const Scope scope : {Scope::kWorker, Scope::kBackbone, Scope::kAdmin, Scope::kViewer})
    if (text == to_string(scope)) return scope;
  return std::nullopt;
}

std::string_view to_string(Side side) {
  switch (side) {
    case Side::kWorker: return "worker";
    case Side::kServedTo: return "served_to";
    case Side::kRelayToWorker: return "relay_to_worker";
    case Side::kRelayToBackbone: return "relay_to_backbone";
    default: return "backbone";
  }
}
Side parse_side(std::string_view text) {
  for (const Side side : {Side::kWorker, Side::kServedTo, Side::kRelayToWorker, Side::kRelayToBackbone})
    if (text == to_string(side)) return side;
  return Side::kBackbone;
}

}  // namespace kvasir::hub
