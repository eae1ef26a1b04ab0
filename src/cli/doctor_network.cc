#include <format>

#include "base/clock.h"
#include "cli/console.h"
#include "cli/doctor.h"
#include "discovery/finder.h"
#include "dispatch/dispatcher.h"
#include "ffn/engine.h"
#include "hub/client/hub_client.h"
#include "net/connect.h"
#include "verify/worker_client.h"

namespace kvasir::cli {
namespace {

constexpr Nanos kConnectWait = std::chrono::seconds(5);
// A token passes through some 48 layers one after the other: from here on that is half a second.
constexpr double kFarMs = 10;

void examine_worker(const dispatch::WorkerAddress& where, const std::string& token, const wire::NumericsId& numerics,
                    bool fast, Findings& findings) {
  const std::string subject = "worker " + net::format_host_port({where.host, where.port});
  // A TCP handshake takes one round trip and asks nothing of the program at the other end.
  const TimePoint began = monotonic_now();
  const Result<net::Fd> fd = net::connect_to({where.host, where.port}, kConnectWait);
  if (!fd) {
    findings.push_back({Grade::kBad, subject,
                        fd.error().message + " See that it runs, that it listens on that address (--serve 0.0.0.0:PORT), and that "
                                             "no firewall is between."});
    return;
  }
  const double ms = std::chrono::duration<double, std::milli>(monotonic_now() - began).count();
  const auto client = verify::WorkerClient::connect(where, {.token = token, .numerics_id = numerics});
  if (!client) {
    findings.push_back({Grade::kBad, subject, client.error().message});
    return;
  }
  std::uint64_t n_experts = 0;
  for (const wire::Holding& holding : (*client)->holdings().entries)
    n_experts += holding.experts.size();
  const std::string holds = std::format("holds {} experts of {} layers, {:.1f} ms away", n_experts,
                                        (*client)->holdings().entries.size(), ms);
  if (!fast && !(*client)->why_fast().empty())
    findings.push_back({Grade::kBad, subject,
                        std::format("{}, but is another build, which class exact refuses ({}); set KVASIR_NUMERICS=fast, and judge it "
                                    "with kvasir verify.",
                                    holds, (*client)->why_fast())});
  else if (ms > kFarMs)
    findings.push_back({Grade::kNote, subject,
                        std::format("{}: a token waits for that in each layer; expect few tokens a second (kvasir plan).", holds)});
  else
    findings.push_back({Grade::kGood, subject, holds + "."});
}

}  // namespace

Status examine_workers(const std::string& workers, const std::string& token, bool fast, Findings& findings) {
  KVASIR_ASSIGN(const std::vector<dispatch::WorkerAddress> table, dispatch::parse_workers(workers));
  KVASIR_ASSIGN(const wire::NumericsId numerics, ffn::numerics_id());
  for (const dispatch::WorkerAddress& where : table) examine_worker(where, token, numerics, fast, findings);
  return {};
}

void examine_lan(Findings& findings) {
  const auto found = discovery::find_services();
  if (!found) {
    findings.push_back({Grade::kNote, "local network", found.error().message});
    return;
  }
  if (found->empty())
    findings.push_back({Grade::kGood, "local network",
                        "no hub and no worker announces itself here; one elsewhere is reached by its address."});
  for (const discovery::Service& service : *found) {
    const std::string version = service.value("version");
    const bool same = version.empty() || version == KVASIR_VERSION;
    findings.push_back({same ? Grade::kGood : Grade::kNote, "local network",
                        std::format("{}: {}{}", service.name, service.link(),
                                    same ? "." : std::format(" runs version {}, this is {}; upgrade the older one.",
                                                             version, KVASIR_VERSION))});
  }
}

void examine_hub(const std::string& url, const std::string& ca_file, Findings& findings) {
  // Its health is for everyone, so no real token is sent; the client wants one all the same.
  const Result<hub::HubAddress> address = hub::check_address({.url = url, .token = "anonymous", .ca_file = ca_file});
  if (!address) {
    findings.push_back({Grade::kBad, "hub", address.error().message});
    return;
  }
  const auto client = hub::HubClient::create(*address);
  const Result<hub::HubReply> reply = client ? (*client)->get("/api/health") : std::unexpected(client.error());
  if (!reply) {
    findings.push_back({Grade::kBad, "hub", reply.error().message});
  } else if (reply->status != 200) {
    findings.push_back({Grade::kBad, "hub", std::format("{} is there, but: {}", url, reply->error())});
  } else {
    const std::string version = reply->json().value("version", "unknown");
    if (version == KVASIR_VERSION)
      findings.push_back({Grade::kGood, "hub", std::format("{} answers, version {}.", url, version)});
    else
      findings.push_back({Grade::kNote, "hub",
                          std::format("{} runs version {}, this is {}; they talk as long as the protocol is the same, but upgrade "
                                      "the older one.",
                                      url, version, KVASIR_VERSION)});
  }
}

}  // namespace kvasir::cli
