#include "cli/metrics_option.h"

#include <algorithm>

#include "base/metrics.h"
#include "net/connect.h"

namespace kvasir::cli {

bool is_metrics_port(const std::string& option) {
  if (option.empty() || option.find('/') != std::string::npos) return false;
  const std::string port = option.substr(option.rfind(':') + 1);  // npos + 1 is 0
  return !port.empty() && std::ranges::all_of(port, [](unsigned char c) { return c >= '0' && c <= '9'; });
}

Result<std::unique_ptr<net::TextServer>> serve_metrics(const std::string& option, std::function<std::string()> text) {
  if (!is_metrics_port(option)) return nullptr;
  KVASIR_ASSIGN(const net::HostPort where, net::parse_host_port(option, "127.0.0.1"));
  return net::TextServer::start(where, std::string(kMetricsContentType), std::move(text));
}

}  // namespace kvasir::cli
