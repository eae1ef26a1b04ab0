#include "hub/http/router.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace kvasir::hub {
namespace {

using nlohmann::json;

bool fits(std::string_view pattern, const std::vector<std::string>& path,
          std::map<std::string, std::string, std::less<>>& parameters) {
  pattern.remove_prefix(1);
  for (std::size_t i = 0; i < path.size(); ++i) {
    const std::size_t slash = pattern.find('/');
    const std::string_view wanted = pattern.substr(0, slash);
    if (wanted.starts_with('{')) {
      if (path[i].empty()) return false;
      parameters[std::string(wanted.substr(1, wanted.size() - 2))] = path[i];
    } else if (wanted != path[i]) {
      return false;
    }
    const bool last = slash == std::string_view::npos;
    if (last) return i + 1 == path.size();
    pattern.remove_prefix(slash + 1);
  }
  return false;
}

// A schema that the example satisfies: its types, field by field.
json schema_of(const json& example) {
  if (example.is_boolean()) return {{"type", "boolean"}};
  if (example.is_number_integer()) return {{"type", "integer"}};
  if (example.is_number()) return {{"type", "number"}};
  if (example.is_string()) return {{"type", "string"}};
  if (example.is_array())
    return {{"type", "array"}, {"items", example.empty() ? json::object() : schema_of(example.front())}};
  json properties = json::object();
  for (const auto& [name, value] : example.items()) properties[name] = schema_of(value);
  return {{"type", "object"}, {"properties", properties}};
}

json content(const std::string& example) {
  if (example.empty()) return {{"application/octet-stream", {{"schema", {{"type", "string"}, {"format", "binary"}}}}}};
  const json value = json::parse(example);
  return {{"application/json", {{"schema", schema_of(value)}, {"example", value}}}};
}

}  // namespace

bool Route::permits(Scope scope) const {
  return is_public() || std::ranges::any_of(scopes, [scope](Scope needed) { return hub::permits(scope, needed); });
}

Router::Match Router::match(Request& request) const {
  Match out;
  for (const Route& route : routes_) {
    std::map<std::string, std::string, std::less<>> parameters;
    if (!fits(route.pattern, request.path, parameters)) continue;
    if (route.method == request.method) {
      request.parameters = std::move(parameters);
      out.route = &route;
      return out;
    }
    out.allowed.push_back(route.method);
  }
  return out;
}

json Router::openapi(std::string_view version) const {
  const json error = {{"description", "what is wrong, in a sentence"},
                      {"content", {{"application/json", {{"schema", {{"$ref", "#/components/schemas/Error"}}}}}}}};
  json paths = json::object();
  for (const Route& route : routes_) {
    json operation = {
        {"summary", route.summary},
        {"responses",
         {{"200", {{"description", "done"}, {"content", content(route.answer_example)}}}, {"default", error}}}};
    json parameters = json::array();
    for (std::size_t at = route.pattern.find('{'); at != std::string::npos; at = route.pattern.find('{', at + 1))
      parameters.push_back({{"name", route.pattern.substr(at + 1, route.pattern.find('}', at) - at - 1)},
                            {"in", "path"},
                            {"required", true},
                            {"schema", {{"type", "string"}}}});
    for (const RouteParameter& p : route.query)
      parameters.push_back({{"name", p.name},
                            {"in", "query"},
                            {"required", p.required},
                            {"description", p.description},
                            {"schema", {{"type", "string"}}}});
    if (!parameters.empty()) operation["parameters"] = parameters;
    if (!route.body_example.empty())
      operation["requestBody"] = {{"required", true}, {"content", content(route.body_example)}};
    if (!route.is_public()) {
      json scopes = json::array();
      for (const Scope scope : route.scopes) scopes.push_back(to_string(scope));
      operation["security"] = json::array({{{"token", scopes}}});
    }
    std::string method = route.method;
    std::ranges::transform(method, method.begin(), [](unsigned char c) { return static_cast<char>(c | 0x20); });
    paths[route.pattern][method] = operation;
  }
  return {{"openapi", "3.1.0"},
          {"info", {{"title", "Kvasir hub"}, {"version", version}}},
          {"paths", paths},
          {"components",
           {{"securitySchemes", {{"token", {{"type", "http"}, {"scheme", "bearer"}}}}},
            {"schemas",
             {{"Error",
               {{"type", "object"}, {"required", {"error"}}, {"properties", {{"error", {{"type", "string"}}}}}}}}}}}};
}

}  // namespace kvasir::hub
