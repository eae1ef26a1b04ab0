// The table of routes: what is served, to whom, and what it takes. The OpenAPI description is
// made from this table, so it cannot say something else.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "hub/http/message.h"

namespace kvasir::hub {

inline constexpr std::size_t kBodyBytesMax = 1u << 20;  // of any request with a JSON body

struct RouteParameter {
  std::string name;
  std::string description;
  bool required = false;
};

struct Route {
  std::string method;   // "GET" (HEAD comes with it) or "POST"
  std::string pattern;  // "/api/models/{m}/manifest"
  std::string summary;
  std::vector<Scope> scopes;  // of the tokens that may; none: everybody. Admins always may
  std::vector<RouteParameter> query;
  std::string body_example;    // JSON; empty: the route takes no body
  std::string answer_example;  // JSON; empty: the answer is a file
  std::function<Response(const Request&)> handler;  // may block; exceptions must not leave it
  bool websocket = false;  // upgrades go to the relay; the handler answers what is none
  std::size_t body_bytes_max() const { return body_example.empty() ? 0 : kBodyBytesMax; }
  bool is_public() const { return scopes.empty(); }
  bool permits(Scope scope) const;
};

class Router {
 public:
  void add(Route route) { routes_.push_back(std::move(route)); }
  const std::vector<Route>& routes() const { return routes_; }

  struct Match {
    const Route* route = nullptr;
    std::vector<std::string> allowed;  // methods of that path, where only the method is wrong
  };
  // Fills request.parameters.
  Match match(Request& request) const;

  nlohmann::json openapi(std::string_view version) const;

 private:
  std::vector<Route> routes_;
};

}  // namespace kvasir::hub
