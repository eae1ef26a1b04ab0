#include "hub/store/store.h"

#include <chrono>

namespace kvasir::hub {

UnixSeconds unix_now() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string_view to_string(Scope scope) {
  switch (scope) {
    case Scope::kWorker: return "worker";
    case Scope::kBackbone: return "backbone";
    case Scope::kAdmin: return "admin";
  }
  return "unknown";
}

std::optional<Scope> parse_scope(std::string_view text) {
  for (const Scope scope : {Scope::kWorker, Scope::kBackbone, Scope::kAdmin})
    if (text == to_string(scope)) return scope;
  return std::nullopt;
}

std::string_view to_string(Side side) { return side == Side::kBackbone ? "backbone" : "worker"; }

}  // namespace kvasir::hub
