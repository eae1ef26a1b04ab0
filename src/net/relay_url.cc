#include "net/relay_url.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstdlib>
#include <format>
#include <initializer_list>

namespace kvasir::net {
namespace {

constexpr std::uint16_t kHttpsPort = 443, kHttpPort = 80, kProxyPort = 1080;

bool same_text(std::string_view a, std::string_view b) {
  return std::ranges::equal(a, b, [](char x, char y) {
    const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; };
    return lower(x) == lower(y);
  });
}

// "host", "host:port" or "[v6]:port".
Result<HostPort> host_with_port(std::string_view text, std::uint16_t default_port) {
  const bool has_port = text.starts_with('[') ? !text.ends_with(']') : text.contains(':');
  if (has_port) return parse_host_port(text);
  return parse_host_port(std::format("{}:{}", text, default_port));
}

const char* first_set(std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (const char* value = std::getenv(name); value != nullptr && *value != '\0') return value;
  return nullptr;
}

}  // namespace

bool is_loopback_host(std::string_view host) {
  if (host == "::1" || same_text(host, "localhost")) return true;
  in_addr address{};
  return ::inet_pton(AF_INET, std::string(host).c_str(), &address) == 1 && ntohl(address.s_addr) >> 24 == 127;
}

Result<RelayUrl> parse_relay_url(std::string_view text) {
  const auto refuse = [&] {
    return fix_input(std::format("'{}' is not the address of a relay; write https://HOST.", text));
  };
  while (text.ends_with('/')) text.remove_suffix(1);
  const std::size_t scheme_end = text.find("://");
  if (scheme_end == std::string_view::npos) return refuse();
  const std::string_view scheme = text.substr(0, scheme_end), rest = text.substr(scheme_end + 3);
  if (rest.empty() || rest.find_first_of("/?#@ ") != std::string_view::npos) return refuse();
  RelayUrl out;
  out.encrypted = scheme == "https" || scheme == "wss";
  if (!out.encrypted && scheme != "http" && scheme != "ws") return refuse();
  KVASIR_ASSIGN(out.where, host_with_port(rest, out.encrypted ? kHttpsPort : kHttpPort));
  if (out.where.port == 0) return refuse();
  if (!out.encrypted && !is_loopback_host(out.where.host))
    return fix_input("over http:// and ws:// the token would cross the network in the clear; use https://.");
  return out;
}

Result<HttpProxy> parse_proxy(std::string_view text) {
  // The text may hold a password: it is not repeated.
  const auto refuse = [] {
    return fix_input("the proxy named in the environment (https_proxy) must be http://[USER:PASSWORD@]HOST[:PORT].");
  };
  while (text.ends_with('/')) text.remove_suffix(1);
  if (const std::size_t scheme_end = text.find("://"); scheme_end != std::string_view::npos) {
    if (!same_text(text.substr(0, scheme_end), "http")) return refuse();
    text.remove_prefix(scheme_end + 3);
  }
  HttpProxy out;
  if (const std::size_t at = text.rfind('@'); at != std::string_view::npos) {
    out.credentials = text.substr(0, at);
    text.remove_prefix(at + 1);
  }
  const Result<HostPort> where = host_with_port(text, kProxyPort);
  if (!where || where->port == 0 || text.find_first_of("/?# ") != std::string_view::npos) return refuse();
  out.where = *where;
  return out;
}

bool is_excepted(std::string_view host, std::string_view no_proxy) {
  while (!no_proxy.empty()) {
    std::string_view item = no_proxy.substr(0, no_proxy.find(','));
    no_proxy = item.size() == no_proxy.size() ? std::string_view{} : no_proxy.substr(item.size() + 1);
    while (item.starts_with(' ')) item.remove_prefix(1);
    while (item.ends_with(' ')) item.remove_suffix(1);
    if (item == "*") return true;
    while (item.starts_with('.')) item.remove_prefix(1);
    if (item.empty() || item.size() > host.size()) continue;
    // The name itself, or anything under it.
    const std::string_view tail = host.substr(host.size() - item.size());
    if (same_text(tail, item) && (tail.size() == host.size() || host[host.size() - item.size() - 1] == '.')) return true;
  }
  return false;
}

Result<std::optional<HttpProxy>> proxy_from_environment(std::string_view host) {
  const char* named = first_set({"https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"});
  if (named == nullptr || is_loopback_host(host)) return std::nullopt;
  if (const char* excepted = first_set({"no_proxy", "NO_PROXY"}); excepted != nullptr && is_excepted(host, excepted))
    return std::nullopt;
  KVASIR_ASSIGN(HttpProxy proxy, parse_proxy(named));
  return proxy;
}

}  // namespace kvasir::net
