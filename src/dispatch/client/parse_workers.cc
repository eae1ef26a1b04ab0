#include <string>

#include "dispatch/core/tuning.h"
#include "dispatch/dispatcher.h"
#include "net/connect.h"
#include "net/tls_identity.h"

namespace kvasir::dispatch {
namespace {

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t' || text.front() == '\n')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t' || text.back() == '\n')) text.remove_suffix(1);
  return text;
}

}  // namespace

Result<std::vector<WorkerAddress>> parse_workers(std::string_view text) {
  std::vector<WorkerAddress> workers;
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    const std::string_view item = trimmed(text.substr(0, comma));
    text = comma == std::string_view::npos ? std::string_view{} : text.substr(comma + 1);
    if (item.empty()) continue;
    const std::size_t hash = item.find('#');
    KVASIR_ASSIGN(net::HostPort where, net::parse_host_port(item.substr(0, hash)));
    if (where.port == 0)
      return fix_input("worker '" + std::string(item) + "' has port 0; write the port that the worker printed.");
    WorkerAddress worker{.host = std::move(where.host), .port = where.port, .fingerprint = {}};
    if (hash != std::string_view::npos) {
      KVASIR_ASSIGN(const net::Fingerprint fingerprint, net::parse_fingerprint(item.substr(hash + 1)));
      worker.fingerprint = net::format_fingerprint(fingerprint);
    }
    if (workers.size() == kWorkersMax)
      return fix_input("more than " + std::to_string(kWorkersMax) + " workers are named; use fewer.");
    workers.push_back(std::move(worker));
  }
  return workers;
}

}  // namespace kvasir::dispatch
