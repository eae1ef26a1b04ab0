// Everything in maps: for tests, and for a hub that need not remember.

#include <algorithm>
#include <map>
#include <tuple>

#include "base/mutex.h"
#include "hub/store/store.h"

namespace kvasir::hub {
namespace {

class MemoryStore final : public Store {
 public:
  Status put_token(const TokenRecord& token) override {
    const MutexLock lock(mutex_);
    if (!tokens_.emplace(token.id, token).second) return fatal("a token of this id exists already.");
    order_.push_back(token.id);
    return {};
  }
  Result<std::optional<TokenRecord>> find_token(std::string_view id) override {
    const MutexLock lock(mutex_);
    return find(tokens_, id);
  }
  Result<std::vector<TokenRecord>> list_tokens() override {
    const MutexLock lock(mutex_);
    std::vector<TokenRecord> out;
    for (const std::string& id : order_) out.push_back(tokens_.at(id));
    return out;
  }
  Result<bool> revoke_token(std::string_view id, UnixSeconds now) override {
    const MutexLock lock(mutex_);
    return revoke(tokens_, id, now);
  }

  Status put_key(const KeyRecord& key) override {
    const MutexLock lock(mutex_);
    keys_.insert_or_assign(key.public_key, key);
    return {};
  }
  Result<std::optional<KeyRecord>> find_key(std::string_view public_key) override {
    const MutexLock lock(mutex_);
    return find(keys_, public_key);
  }
  Result<std::vector<KeyRecord>> list_keys() override {
    const MutexLock lock(mutex_);
    return values(keys_);
  }
  Result<bool> revoke_key(std::string_view public_key, UnixSeconds now) override {
    const MutexLock lock(mutex_);
    return revoke(keys_, public_key, now);
  }

  Result<std::string> claim_worker(std::string_view worker_id, std::string_view owner, UnixSeconds) override {
    const MutexLock lock(mutex_);
    return owners_.emplace(worker_id, owner).first->second;
  }

  Status put_relay_session(std::string_view session, std::string_view hub_url, UnixSeconds now) override {
    const MutexLock lock(mutex_);
    relay_sessions_[std::string(session)] = {std::string(hub_url), now};
    return {};
  }
  Result<std::optional<std::string>> find_relay_session(std::string_view session) override {
    const MutexLock lock(mutex_);
    const auto found = relay_sessions_.find(std::string(session));
    return found == relay_sessions_.end() ? std::nullopt : std::optional(found->second.first);
  }

  Status put_ban(const BanRecord& ban) override {
    const MutexLock lock(mutex_);
    bans_.insert_or_assign(ban.worker_id, ban);
    return {};
  }
  Result<bool> remove_ban(std::string_view worker_id) override {
    const MutexLock lock(mutex_);
    const auto found = bans_.find(worker_id);
    if (found == bans_.end()) return false;
    bans_.erase(found);
    return true;
  }
  Result<std::vector<BanRecord>> list_bans() override {
    const MutexLock lock(mutex_);
    return values(bans_);
  }

  Result<bool> add_contributions(const std::vector<Contribution>& entries, std::string_view report_id,
                                 UnixSeconds now) override {
    const MutexLock lock(mutex_);
    if (!report_id.empty() && !reports_.emplace(report_id, now).second) return false;
    for (const Contribution& entry : entries) {
      Contribution& sum =
          ledger_.try_emplace({entry.day, entry.worker_id, entry.reporter, entry.side}, Contribution{}).first->second;
      const Contribution before = sum;
      sum = entry;
      sum.pairs += before.pairs;
      sum.rows += before.rows;
      sum.bytes += before.bytes;
    }
    return true;
  }
  Result<std::vector<Contribution>> contributions(std::int64_t from, std::int64_t to) override {
    const MutexLock lock(mutex_);
    std::vector<Contribution> out;
    for (const auto& [key, entry] : ledger_)
      if (from <= entry.day && entry.day <= to) out.push_back(entry);
    return out;
  }

  Result<std::int64_t> pairs_used(std::int64_t day, std::string_view reporter) override {
    const MutexLock lock(mutex_);
    std::int64_t own = 0, served = 0;
    for (const auto& [key, entry] : ledger_) {
      if (entry.day != day || entry.reporter != reporter) continue;
      if (entry.side == Side::kBackbone) own += entry.pairs;
      if (entry.side == Side::kServedTo) served += entry.pairs;
    }
    return std::max(own, served);
  }

  Status prune(UnixSeconds before) override {
    const MutexLock lock(mutex_);
    std::erase_if(reports_, [before](const auto& report) { return report.second < before; });
    std::erase_if(relay_sessions_, [before](const auto& session) { return session.second.second < before; });
    return {};
  }
  Status check() override { return {}; }

 private:
  template <typename T>
  using ByText = std::map<std::string, T, std::less<>>;

  template <typename T>
  static std::optional<T> find(const ByText<T>& table, std::string_view key) {
    const auto found = table.find(key);
    return found == table.end() ? std::nullopt : std::optional(found->second);
  }
  template <typename T>
  static std::vector<T> values(const ByText<T>& table) {
    std::vector<T> out;
    for (const auto& [key, value] : table) out.push_back(value);
    return out;
  }
  template <typename T>
  static bool revoke(ByText<T>& table, std::string_view key, UnixSeconds now) {
    const auto found = table.find(key);
    if (found == table.end()) return false;
    if (!found->second.revoked) found->second.revoked = now;
    return true;
  }

  Mutex mutex_;
  ByText<TokenRecord> tokens_ KVASIR_GUARDED_BY(mutex_);
  std::vector<std::string> order_ KVASIR_GUARDED_BY(mutex_);  // of tokens, oldest first
  ByText<KeyRecord> keys_ KVASIR_GUARDED_BY(mutex_);
  ByText<std::string> owners_ KVASIR_GUARDED_BY(mutex_);
  ByText<BanRecord> bans_ KVASIR_GUARDED_BY(mutex_);
  std::map<std::string, std::pair<std::string, UnixSeconds>> relay_sessions_ KVASIR_GUARDED_BY(mutex_);
  std::map<std::tuple<std::int64_t, std::string, std::string, Side>, Contribution> ledger_ KVASIR_GUARDED_BY(mutex_);
  ByText<UnixSeconds> reports_ KVASIR_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<Store> make_memory_store() { return std::make_unique<MemoryStore>(); }

}  // namespace kvasir::hub
