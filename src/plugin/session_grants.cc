#include "plugin/session_grants.h"

#include <algorithm>
#include <format>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/hex.h"

namespace kvasir::plugin {
namespace {

using nlohmann::json;

constexpr std::size_t kWorkersPerRequestMax = 1024;    // the hub's limit
constexpr Nanos kAskAgain = std::chrono::seconds(30);  // of a hub that gave none
constexpr std::uint64_t kLifeMax_s = 86'400;           // whatever a hub says

}  // namespace

Result<std::shared_ptr<SessionGrants>> SessionGrants::make() {
  KVASIR_ASSIGN(net::SigningKey key, net::SigningKey::make());
  return std::shared_ptr<SessionGrants>(new SessionGrants(std::move(key)));
}

dispatch::GrantSource SessionGrants::source() {
  return {
      .key = key_,
      .find = [self = shared_from_this()](const std::string& worker) { return self->find(worker, monotonic_now()); },
      .refused = [self = shared_from_this()](const std::string& worker) { self->refused(worker); }};
}

std::string SessionGrants::find(const std::string& worker, TimePoint now) {
  const MutexLock lock(mutex_);
  const auto found = held_.find(worker);
  return found == held_.end() || now >= found->second.expires ? std::string() : found->second.text;
}

void SessionGrants::refused(const std::string& worker) {
  const MutexLock lock(mutex_);
  if (const auto found = held_.find(worker); found != held_.end()) found->second.text.clear();
}

Status SessionGrants::without(const std::string& why, TimePoint now) {
  ask_again_ = now + kAskAgain;
  if (std::exchange(without_said_, true)) return {};
  return retry_later(std::format("the hub gives no session grants ({}) Workers are shown their tickets instead.", why));
}

Status SessionGrants::renew(hub::HubClient& hub, const std::vector<std::string>& workers, TimePoint now) {
  std::vector<std::string> due;
  {
    const std::set<std::string_view> wanted(workers.begin(), workers.end());
    const MutexLock lock(mutex_);
    std::erase_if(held_, [&](const auto& entry) { return !wanted.contains(entry.first); });
    for (const std::string& worker : workers) {
      const auto found = held_.find(worker);
      if (found == held_.end() || now >= found->second.renew_at) due.push_back(worker);
    }
  }
  if (due.empty() || now < ask_again_) return {};
  for (std::size_t at = 0; at < due.size(); at += kWorkersPerRequestMax) {
    const std::size_t n = std::min(kWorkersPerRequestMax, due.size() - at);
    const std::vector<std::string> some(due.begin() + static_cast<std::ptrdiff_t>(at),
                                        due.begin() + static_cast<std::ptrdiff_t>(at + n));
    const auto reply =
        hub.post("/api/expert-grants", {{"public_key", to_hex(ByteSpan(key_.public_key()))}, {"workers", some}});
    if (!reply || reply->status != 200) return without(reply ? reply->error() : reply.error().message, now);
    const json answer = reply->json();
    const json life_s = answer.value("expires_in_s", json());
    const json given = answer.value("grants", json::object());
    if (!life_s.is_number_unsigned() || !given.is_object()) return without("its answer is malformed.", now);
    const Nanos life = std::chrono::seconds(std::min(life_s.get<std::uint64_t>(), kLifeMax_s));
    const MutexLock lock(mutex_);
    for (const std::string& worker : some) {
      const auto found = given.find(worker);
      const bool has = found != given.end() && found->is_string();
      held_[worker] = {has ? found->get<std::string>() : std::string(), now + life / 2, now + life};
    }
  }
  without_said_ = false;
  return {};
}

}  // namespace kvasir::plugin
