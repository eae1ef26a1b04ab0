// Where a relay is, and through which HTTP proxy it is reached.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "net/connect.h"

namespace kvasir::net {

// 127.0.0.0/8, ::1 and "localhost": bytes to these never leave the machine.
bool is_loopback_host(std::string_view host);

struct RelayUrl {
  bool encrypted = true;
  HostPort where;
};
// "https://HOST[:PORT]" or "wss://…", without a path; "http://" and "ws://" for loopback hosts
// only, because a token travels with the request.
Result<RelayUrl> parse_relay_url(std::string_view text);

struct HttpProxy {
  HostPort where;
  std::string credentials;  // "user:password", or empty; never logged
};
// The proxy that the environment names for this host: https_proxy, HTTPS_PROXY, all_proxy,
// ALL_PROXY, less what no_proxy or NO_PROXY excepts. Only http:// proxies, which carry TLS
// through CONNECT; nothing for loopback hosts.
Result<std::optional<HttpProxy>> proxy_from_environment(std::string_view host);

// Of one proxy's URL and of an exception list, for the above.
Result<HttpProxy> parse_proxy(std::string_view text);
bool is_excepted(std::string_view host, std::string_view no_proxy);

}  // namespace kvasir::net
