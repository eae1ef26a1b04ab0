#include "hub/relay/relay.h"

#include <algorithm>
#include <deque>
#include <format>
#include <map>
#include <set>
#include <thread>
#include <unordered_map>

#include "base/mutex.h"
#include "hub/relay/relay_pair.h"

namespace kvasir::hub {
namespace {

constexpr auto kQuiet = asio::as_tuple(asio::use_awaitable);
constexpr auto kWatchInterval = std::chrono::seconds(1);
constexpr Nanos kStopPatience = std::chrono::milliseconds(500);
constexpr const char* kStopReason = "the relay stops; dial again";

using PairPtr = std::shared_ptr<RelayPair>;

// A backbone that waits for a worker's next socket.
struct Asker {
  explicit Asker(asio::any_io_executor executor) : timer(std::move(executor)) {}
  asio::steady_timer timer;
  RelaySlotPtr given;
};

class Counter {
 public:
  std::size_t of(const std::string& key) const {
    const auto found = counts_.find(key);
    return found == counts_.end() ? 0 : found->second;
  }
  void add(const std::string& key) { ++counts_[key]; }
  void remove(const std::string& key) {
    const auto found = counts_.find(key);
    if (found != counts_.end() && --found->second == 0) counts_.erase(found);
  }

 private:
  std::unordered_map<std::string, std::size_t> counts_;
};

class RelayImpl final : public Relay, public std::enable_shared_from_this<RelayImpl> {
 public:
  RelayImpl(RelayOptions options, RelayHost& host, asio::any_io_executor executor, asio::thread_pool& recorders,
            std::function<void(const std::string&)> log)
      : options_(options), host_(host), executor_(std::move(executor)), recorders_(recorders), log_(std::move(log)) {}

  void start() { asio::co_spawn(asio::make_strand(executor_), watch(shared_from_this()), asio::detached); }

  // --- workers --------------------------------------------------------------------------

  std::optional<RelayRefusal> refuse_worker(const std::string& session, const std::string& token_id) override {
    if (host_.is_banned(session)) return RelayRefusal{403, std::format("worker '{}' is banned from this hub.", session)};
    const auto owned = host_.may_serve(session, token_id);
    if (!owned) return RelayRefusal{503, owned.error().message};
    if (!*owned)
      return RelayRefusal{403, std::format("the session '{}' belongs to another token; choose another.", session)};
    host_.waits_here(session);
    const MutexLock lock(mutex_);
    if (stopping_) return RelayRefusal{503, "the relay is stopping; try again in a moment."};
    if (n_waiting_ >= options_.waiting_max)
      return RelayRefusal{503, "as many workers wait here as the relay takes; try again later."};
    if (waiting_by_token_.of(token_id) >= options_.waiting_per_token_max)
      return RelayRefusal{429, "as many sockets wait with this token as one token may have."};
    return std::nullopt;
  }

  void add_worker(std::shared_ptr<End> worker, std::string session, std::string token_id) override {
    auto slot = std::make_shared<RelaySlot>();
    slot->end = std::move(worker);
    slot->session = std::move(session);
    slot->token_id = std::move(token_id);
    {
      const MutexLock lock(mutex_);
      if (const auto askers = askers_.find(slot->session); askers != askers_.end()) {
        const std::shared_ptr<Asker> asker = askers->second.front();
        askers->second.pop_front();
        if (askers->second.empty()) askers_.erase(askers);
        --n_askers_;
        asker->given = slot;
        asio::post(asker->timer.get_executor(), [asker] { asker->timer.cancel(); });
      } else {
        auto& line = waiting_[slot->session];
        // The newest is the likeliest to be alive; the oldest may be left over from before a
        // worker lost its network.
        if (line.size() >= options_.waiting_per_session_max) {
          close_later(line.front()->end, RelayClose::kReplaced, "a newer socket waits instead");
          forget_waiting(line.front());
          line.pop_front();
        }
        line.push_back(slot);
        ++n_waiting_;
        waiting_by_token_.add(slot->token_id);
        if (stopping_) close_later(slot->end, RelayClose::kRestart, kStopReason);
      }
    }
    const asio::any_io_executor home = slot->end->home;
    asio::co_spawn(home, serve_worker(shared_from_this(), std::move(slot)), asio::detached);
  }

  // --- backbones ------------------------------------------------------------------------

  std::string find_elsewhere(const std::string& session) override {
    {
      const MutexLock lock(mutex_);
      if (waiting_.contains(session)) return {};
    }
    return host_.waits_elsewhere(session);
  }

  asio::awaitable<RelaySlotPtr> take_worker(std::string session, std::string token_id, RelayRefusal& refusal) override {
    const auto keep = shared_from_this();
    const std::shared_ptr<Asker> asker = std::make_shared<Asker>(co_await asio::this_coro::executor);
    {
      const MutexLock lock(mutex_);
      if (auto no = refuse_pair(session, token_id)) {
        refusal = *std::move(no);
        co_return nullptr;
      }
      if (const auto line = waiting_.find(session); line != waiting_.end()) {
        const RelaySlotPtr slot = line->second.back();
        line->second.pop_back();
        forget_waiting(slot);
        if (line->second.empty()) waiting_.erase(line);
        reserve(*slot, token_id);
        co_return slot;
      }
      if (n_askers_ >= options_.askers_max) {
        refusal = {503, "too many wait for workers just now; try again in a moment."};
        co_return nullptr;
      }
      askers_[session].push_back(asker);
      ++n_askers_;
      asker->timer.expires_after(options_.answer_wait);
    }
    co_await asker->timer.async_wait(kQuiet);
    const MutexLock lock(mutex_);
    if (asker->given) {
      if (auto no = refuse_pair(session, token_id)) {
        refusal = *std::move(no);
        close_later(asker->given->end, RelayClose::kDone, "not needed after all");
        co_return nullptr;
      }
      reserve(*asker->given, token_id);
      co_return asker->given;
    }
    if (const auto askers = askers_.find(session); askers != askers_.end()) {
      n_askers_ -= std::erase(askers->second, asker);
      if (askers->second.empty()) askers_.erase(askers);
    }
    refusal = {404, std::format("no worker waits under the session '{}'; it may be off, or on its way.", session)};
    co_return nullptr;
  }

  void join(RelaySlotPtr worker, std::shared_ptr<End> backbone) override {
    backbone->move_to(worker->end->home);
    backbone->heard();
    asio::co_spawn(worker->end->home, run_pair(shared_from_this(), worker, std::move(backbone)), asio::detached);
  }

  void give_up(RelaySlotPtr worker) override {
    const MutexLock lock(mutex_);
    release(worker->session, worker->backbone_token_id);
    close_later(worker->end, RelayClose::kDone, "the backbone that asked is gone");
  }

  // --- figures, end -----------------------------------------------------------------------

  RelayStats stats() const override {
    const MutexLock lock(mutex_);
    RelayStats out{n_waiting_, pairs_.size(), bytes_ended_};
    for (const PairPtr& pair : pairs_) out.bytes += pair->to_worker_bytes + pair->to_backbone_bytes;
    return out;
  }

  void stop() override {
    {
      const MutexLock lock(mutex_);
      stopping_ = true;
      for_each_end([](const std::shared_ptr<End>& end) {
        close_later(end, RelayClose::kRestart, kStopReason);
      });
    }
    wait_until_empty();
    {
      const MutexLock lock(mutex_);
      for_each_end([](const std::shared_ptr<End>& end) { asio::post(end->home, [end] { end->abort(); }); });
    }
    wait_until_empty();
    record(take_uses());
  }

  void forget_sockets() override {
    const MutexLock lock(mutex_);
    waiting_.clear();
    askers_.clear();
    pairs_.clear();
    n_waiting_ = n_askers_ = n_pairs_ = 0;
  }

 private:
  // --- under the mutex --------------------------------------------------------------------

  std::optional<RelayRefusal> refuse_pair(const std::string& session, const std::string& token_id) const
      KVASIR_REQUIRES(mutex_) {
    if (stopping_) return RelayRefusal{503, "the relay is stopping; try again in a moment."};
    if (n_pairs_ >= options_.pairs_max)
      return RelayRefusal{503, "as many connections pass here as the relay takes; try again later."};
    if (pairs_by_session_.of(session) >= options_.pairs_per_session_max)
      return RelayRefusal{429, std::format("the worker '{}' has as many connections as it takes.", session)};
    if (pairs_by_token_.of(token_id) >= options_.pairs_per_token_max)
      return RelayRefusal{429, "as many connections pass with this token as one token may have."};
    return std::nullopt;
  }
  void reserve(RelaySlot& slot, const std::string& token_id) KVASIR_REQUIRES(mutex_) {
    slot.backbone_token_id = token_id;
    ++n_pairs_;
    pairs_by_session_.add(slot.session);
    pairs_by_token_.add(token_id);
  }
  void release(const std::string& session, const std::string& token_id) KVASIR_REQUIRES(mutex_) {
    --n_pairs_;
    pairs_by_session_.remove(session);
    pairs_by_token_.remove(token_id);
  }
  void forget_waiting(const RelaySlotPtr& slot) KVASIR_REQUIRES(mutex_) {
    --n_waiting_;
    waiting_by_token_.remove(slot->token_id);
  }
  static void close_later(const std::shared_ptr<End>& end, RelayClose code, std::string reason) {
    asio::post(end->home, [end, code, reason = std::move(reason)] { end->close(code, reason); });
  }
  void wait_until_empty() const KVASIR_EXCLUDES(mutex_) {
    for (const TimePoint end = monotonic_now() + kStopPatience; monotonic_now() < end;) {
      {
        const MutexLock lock(mutex_);
        if (pairs_.empty() && waiting_.empty()) return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  template <typename Act>
  void for_each_end(const Act& act) const KVASIR_REQUIRES(mutex_) {
    for (const auto& [session, line] : waiting_)
      for (const RelaySlotPtr& slot : line) act(slot->end);
    for (const PairPtr& pair : pairs_) {
      act(pair->worker);
      act(pair->backbone);
    }
  }
  // What has passed since the last time, put down for the ledger.
  void note_use(RelayPair& pair) KVASIR_REQUIRES(mutex_) {
    const std::uint64_t in = pair.to_worker_bytes, out = pair.to_backbone_bytes;
    if (in == pair.to_worker_noted && out == pair.to_backbone_noted) return;
    RelayUse& use = unrecorded_[{pair.session, pair.token_id}];
    use.session = pair.session;
    use.backbone = pair.token_id;
    use.to_worker_bytes += in - std::exchange(pair.to_worker_noted, in);
    use.to_backbone_bytes += out - std::exchange(pair.to_backbone_noted, out);
  }

  // --- on a socket's executor ---------------------------------------------------------------

  static asio::awaitable<void> serve_worker(std::shared_ptr<RelayImpl> self, RelaySlotPtr slot) {
    const End::Got got = co_await slot->end->read_piece(false);
    if (slot->pair) {
      const PairPtr pair = slot->pair;
      const PumpEnd end = co_await pump(*pair->worker, *pair->backbone, pair->to_backbone_bytes, pair->moved_ns, got);
      co_return self->end_pump(pair, *pair->worker, *pair->backbone, end, "worker");
    }
    slot->dead = true;  // whoever has taken it finds out in run_pair
    {
      const MutexLock lock(self->mutex_);
      const auto line = self->waiting_.find(slot->session);
      if (line != self->waiting_.end() && std::erase(line->second, slot) > 0) {
        self->forget_waiting(slot);
        if (line->second.empty()) self->waiting_.erase(line);
      }
    }
    if (!got.error) slot->end->close(RelayClose::kPolicy, "nobody listens yet: a worker speaks second");
  }

  static asio::awaitable<void> run_pair(std::shared_ptr<RelayImpl> self, RelaySlotPtr slot,
                                        std::shared_ptr<End> backbone) {
    slot->end->watch_closely();
    backbone->watch_closely();
    if (slot->dead) {
      backbone->close(RelayClose::kGone, "the worker is gone; dial again");
      const MutexLock lock(self->mutex_);
      self->release(slot->session, slot->backbone_token_id);
      co_return;
    }
    const PairPtr pair = std::make_shared<RelayPair>();
    pair->worker = slot->end;
    pair->backbone = std::move(backbone);
    pair->session = slot->session;
    pair->token_id = slot->backbone_token_id;
    slot->pair = pair;
    {
      const MutexLock lock(self->mutex_);
      self->pairs_.insert(pair);
      if (self->stopping_) close_later(pair->backbone, RelayClose::kRestart, kStopReason);
    }
    const PumpEnd end = co_await pump(*pair->backbone, *pair->worker, pair->to_worker_bytes, pair->moved_ns, {});
    self->end_pump(pair, *pair->backbone, *pair->worker, end, "backbone");
  }

  void end_pump(const PairPtr& pair, End& from, End& to, const PumpEnd& end, std::string_view from_name) {
    if (!std::exchange(pair->ending, true)) {
      // The one that failed is no longer spoken to; the other is told.
      End& lost = end.from_failed ? from : to;
      End& other = end.from_failed ? to : from;
      if (end.in_order) {
        other.close(RelayClose::kDone, "the other end has closed");
      } else {
        other.close(RelayClose::kGone, "the other end is gone");
        const bool worker_lost = (from_name == "worker") == end.from_failed;
        log_(std::format("relay: the {} of session '{}' is gone; the other end is told.",
                         worker_lost ? "worker" : "backbone", pair->session));
      }
      lost.abort();
    }
    if (--pair->pumps > 0) return;
    const MutexLock lock(mutex_);
    note_use(*pair);
    bytes_ended_ += pair->to_worker_bytes + pair->to_backbone_bytes;
    pairs_.erase(pair);
    release(pair->session, pair->token_id);
  }

  // --- the watchman -------------------------------------------------------------------------

  static asio::awaitable<void> watch(std::shared_ptr<RelayImpl> self) {
    asio::steady_timer timer(co_await asio::this_coro::executor);
    TimePoint reported = monotonic_now();
    while (!self->stopping_) {
      timer.expires_after(kWatchInterval);
      if (const auto [error] = co_await timer.async_wait(kQuiet); error) co_return;
      self->look_around();
      if (monotonic_now() - reported < self->options_.report_interval) continue;
      reported = monotonic_now();
      std::vector<RelayUse> uses = self->take_uses();
      if (!uses.empty())
        asio::post(self->recorders_, [self, uses = std::move(uses)]() mutable { self->record(std::move(uses)); });
    }
  }

  void look_around() {
    const std::int64_t now = End::now_ns();
    const auto since = [now](std::int64_t then) { return Nanos(now - then); };
    const MutexLock lock(mutex_);
    const auto look = [&](const std::shared_ptr<End>& end, Nanos silence, Nanos ping) {
      const std::int64_t closing = end->closing_since_ns, writing = end->writing_since_ns;
      const Nanos silent = since(end->heard_ns);
      const bool late = (closing != 0 && since(closing) > options_.close_wait) ||
                        (writing != 0 && since(writing) > options_.stall) || (end->reading && silent > silence);
      if (late) asio::post(end->home, [end] { end->abort(); });
      else if (closing == 0 && writing == 0 && silent > ping) asio::post(end->home, [end] { end->ping(); });
    };
    for (const auto& [session, line] : waiting_)
      for (const RelaySlotPtr& slot : line) look(slot->end, options_.silence_waiting, options_.ping_waiting);
    for (const PairPtr& pair : pairs_) {
      look(pair->worker, options_.silence_paired, options_.ping_paired);
      look(pair->backbone, options_.silence_paired, options_.ping_paired);
      if (since(pair->moved_ns) <= options_.idle) continue;
      close_later(pair->worker, RelayClose::kIdle, "no bytes for a long time");
      close_later(pair->backbone, RelayClose::kIdle, "no bytes for a long time");
    }
  }

  std::vector<RelayUse> take_uses() {
    const MutexLock lock(mutex_);
    for (const PairPtr& pair : pairs_) note_use(*pair);
    std::vector<RelayUse> out;
    for (auto& [key, use] : unrecorded_) out.push_back(std::move(use));
    unrecorded_.clear();
    return out;
  }

  void record(std::vector<RelayUse> uses) {
    if (uses.empty()) return;
    const Status recorded = host_.record(uses);
    if (recorded) return;
    log_(std::format("what the relay metered could not be recorded ({}) It is kept and tried again.",
                     recorded.error().message));
    const MutexLock lock(mutex_);
    for (RelayUse& use : uses) {
      RelayUse& kept = unrecorded_[{use.session, use.backbone}];
      kept.session = use.session;
      kept.backbone = use.backbone;
      kept.to_worker_bytes += use.to_worker_bytes;
      kept.to_backbone_bytes += use.to_backbone_bytes;
    }
  }

  const RelayOptions options_;
  RelayHost& host_;
  const asio::any_io_executor executor_;
  asio::thread_pool& recorders_;
  const std::function<void(const std::string&)> log_;

  mutable Mutex mutex_;
  // By session, the newest last.
  std::unordered_map<std::string, std::deque<RelaySlotPtr>> waiting_ KVASIR_GUARDED_BY(mutex_);
  std::unordered_map<std::string, std::deque<std::shared_ptr<Asker>>> askers_ KVASIR_GUARDED_BY(mutex_);
  std::set<PairPtr> pairs_ KVASIR_GUARDED_BY(mutex_);
  std::size_t n_waiting_ KVASIR_GUARDED_BY(mutex_) = 0;
  std::size_t n_pairs_ KVASIR_GUARDED_BY(mutex_) = 0;
  std::size_t n_askers_ KVASIR_GUARDED_BY(mutex_) = 0;
  Counter waiting_by_token_ KVASIR_GUARDED_BY(mutex_);
  Counter pairs_by_session_ KVASIR_GUARDED_BY(mutex_);
  Counter pairs_by_token_ KVASIR_GUARDED_BY(mutex_);
  std::map<std::pair<std::string, std::string>, RelayUse> unrecorded_ KVASIR_GUARDED_BY(mutex_);
  std::uint64_t bytes_ended_ KVASIR_GUARDED_BY(mutex_) = 0;  // of pairs that are over
  std::atomic<bool> stopping_ = false;
};

}  // namespace

bool is_session_name(std::string_view name) {
  return !name.empty() && name.size() <= kRelaySessionBytesMax && std::ranges::all_of(name, [](unsigned char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' || c == '_' ||
           c == '-' || c == ':' || c == '@';
  });
}

std::shared_ptr<Relay> Relay::create(RelayOptions options, RelayHost& host, asio::any_io_executor executor,
                                     asio::thread_pool& recorders, std::function<void(const std::string&)> log) {
  auto relay = std::make_shared<RelayImpl>(options, host, std::move(executor), recorders, std::move(log));
  relay->start();
  return relay;
}

}  // namespace kvasir::hub
