#include <optional>
#include <string>
#include <utility>

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

constexpr std::string_view kRelay = "relay:";

}  // namespace

Result<WorkerAddress> parse_worker(std::string_view text) {
  WorkerAddress worker;
  const std::size_t hash = text.find('#');
  // "A", "relay:S" or "A+relay:S"
  std::string_view direct = text.substr(0, hash);
  std::optional<std::string_view> relayed;
  if (direct.starts_with(kRelay)) {
    relayed = std::exchange(direct, {});
  } else if (const std::size_t plus = direct.find('+'); plus != std::string_view::npos) {
    relayed = direct.substr(plus + 1);
    direct = direct.substr(0, plus);
    if (direct.empty()) relayed.emplace();  // as malformed as an empty one
  }
  if (relayed) {
    if (!relayed->starts_with(kRelay) || relayed->size() == kRelay.size())
      return fix_input("'" + std::string(text) +
                       "' is not a worker's address; write HOST:PORT, relay:NAME or HOST:PORT+relay:NAME.");
    worker.relay = relayed->substr(kRelay.size());
  }
  if (!relayed || !direct.empty()) {
    KVASIR_ASSIGN(net::HostPort where, net::parse_host_port(direct));
    if (where.port == 0)
      return fix_input("worker '" + std::string(text) + "' has port 0; write the port that the worker printed.");
    worker.host = std::move(where.host);
    worker.port = where.port;
  }
  if (hash != std::string_view::npos) {
    KVASIR_ASSIGN(const net::Fingerprint fingerprint, net::parse_fingerprint(text.substr(hash + 1)));
    worker.fingerprint = net::format_fingerprint(fingerprint);
  }
  return worker;
}

Result<std::vector<WorkerAddress>> parse_workers(std::string_view text) {
  std::vector<WorkerAddress> workers;
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    const std::string_view item = trimmed(text.substr(0, comma));
    text = comma == std::string_view::npos ? std::string_view{} : text.substr(comma + 1);
    if (item.empty()) continue;
    KVASIR_ASSIGN(WorkerAddress worker, parse_worker(item));
    if (workers.size() == kWorkersMax)
      return fix_input("more than " + std::to_string(kWorkersMax) + " workers are named; use fewer.");
    workers.push_back(std::move(worker));
  }
  return workers;
}

}  // namespace kvasir::dispatch
