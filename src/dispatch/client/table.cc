// Background, third part: the table of workers, which may be replaced at any moment.
#include <algorithm>
#include <utility>

#include "dispatch/client/background.h"
#include "net/tls_identity.h"

namespace kvasir::dispatch {
namespace {

// Of workers that have left: their service is dropped where nobody asks for it.
constexpr std::size_t kDepartedMax = 4 * kWorkersMax;

}  // namespace

// Everything that may fail about a worker before it is connected to.
Status Background::prepare_peer(const WorkerAddress& where, Peer& peer) {
  peer.where = where;
  peer.name = worker_name(where);
  peer.relay = relay_;
  peer.grants = shared_.options.grants ? &*shared_.options.grants : nullptr;
  if (where.host.empty() && !relay_)
    return fix_input("it waits at a relay, and none is named; set KVASIR_RELAY to its https:// address.");
  if (where.host.empty() && where.fingerprint.empty())
    return fix_input("a worker is used through a relay only with its fingerprint; paste the whole link that it prints.");
  if (where.fingerprint.empty()) return {};
  KVASIR_ASSIGN(peer.fingerprint, net::parse_fingerprint(where.fingerprint));
  if (!tls_) {
    KVASIR_ASSIGN(tls_, net::TlsContext::client());
  }
  return {};
}

void Background::sync_table() {
  std::vector<WorkerAddress> wanted;
  {
    const MutexLock lock(shared_.mutex);
    if (!shared_.wanted) return;
    wanted = *std::exchange(shared_.wanted, std::nullopt);
  }
  // First those that go, so that there is room for those that come.
  std::vector<bool> known(wanted.size());
  std::vector<std::pair<std::string, WorkerIndex>> moved;  // by id, from where
  for (WorkerIndex w = 0; w < controls_.size(); ++w) {
    if (controls_[w].use != Use::kWorker) continue;
    const auto found = std::ranges::find(wanted, controls_[w].peer.where);
    if (found != wanted.end()) {
      known[static_cast<std::size_t>(found - wanted.begin())] = true;
      continue;
    }
    if (!controls_[w].peer.where.id.empty()) moved.emplace_back(controls_[w].peer.where.id, w);
    remove_worker(w);
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (known[i]) continue;
    const auto before = std::ranges::find(moved, wanted[i].id, &std::pair<std::string, WorkerIndex>::first);
    add_worker(wanted[i], before == moved.end() ? std::nullopt : std::optional(before->second));
  }
  release_workers();
  const MutexLock lock(shared_.mutex);
  shared_.table_known = true;
}

void Background::add_worker(const WorkerAddress& where, std::optional<WorkerIndex> before) {
  Control control;
  control.use = Use::kWorker;
  if (const Status ready = prepare_peer(where, control.peer); !ready) {
    shared_.log("worker " + control.peer.name + " cannot be used: " + ready.error().message);
    return;
  }
  control.hello = shared_.hello(where);
  // Slots that idle drivers still have links to are taken, too.
  const auto taken = std::ranges::count_if(controls_, [](const Control& c) { return c.use != Use::kFree; });
  if (static_cast<std::size_t>(taken) >= kWorkersMax) {
    if (!std::exchange(table_full_said_, true))
      shared_.log("the table of workers is full (" + std::to_string(kWorkersMax) + "); the others are not asked.");
    return;
  }
  WorkerIndex w = 0;
  {
    const MutexLock lock(shared_.mutex);
    w = shared_.fleet.add(before);
    if (shared_.slots.size() <= w) shared_.slots.resize(w + 1);
    shared_.slots[w] = {where, control.peer.name};
  }
  if (controls_.size() <= w) controls_.resize(w + 1);
  controls_[w] = std::move(control);
  for (Driver& driver : drivers_) {
    if (driver.links.size() <= w) driver.links.resize(w + 1);
    driver.links[w] = {};
  }
}

void Background::remove_worker(WorkerIndex w) {
  Control& control = controls_[w];
  control.attempt.reset();
  control.link.reset();
  control.use = Use::kRemoved;
  {
    const MutexLock lock(shared_.mutex);
    shared_.fleet.remove(w);
  }
  for (Driver& driver : drivers_) {
    DataLink& data = driver.links[w];
    data.attempt.reset();
    data.leaving = !driver.port->retire(w);
  }
  if (control.was_up) shared_.log("worker " + control.peer.name + " has left.");
}

// Slots of removed workers that no driver has a link to any more.
void Background::release_workers() {
  for (WorkerIndex w = 0; w < controls_.size(); ++w) {
    if (controls_[w].use != Use::kRemoved) continue;
    if (std::ranges::any_of(drivers_, [&](const Driver& driver) { return driver.links[w].leaving; })) continue;
    controls_[w] = Control{};
    const MutexLock lock(shared_.mutex);
    if (const Service service = shared_.fleet.take_service(w); !service.empty() && shared_.departed.size() < kDepartedMax)
      shared_.departed.push_back({served_id(shared_.slots[w]), service.pairs, service.rows, service.bytes});
    shared_.fleet.release(w);
  }
}

}  // namespace kvasir::dispatch
