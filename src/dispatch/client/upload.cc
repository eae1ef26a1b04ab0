#include "dispatch/client/upload.h"

#include <poll.h>

#include <algorithm>
#include <format>
#include <thread>
#include <utility>

#include "dispatch/client/dial.h"

namespace kvasir::dispatch {
namespace {

// How long a worker may take over an upload: a connection's worth, and so long for its bytes.
constexpr Nanos kUploadFixedMax = std::chrono::seconds(15);
constexpr std::uint64_t kSlowestUploadBytesPerMs = 1024;
// From the worker's answer until the control connection has its new HOLDINGS.
constexpr Nanos kHoldingsSeenMax = std::chrono::seconds(5);
constexpr auto kLookAgain = std::chrono::milliseconds(1);
constexpr std::uint64_t kUploadRequestId = 1;  // the only request of its connection
// Smaller uploads are done before anybody wonders.
constexpr std::uint64_t kWorthTelling = 64ull << 20;

bool contains(const ExpertSet& all, const ExpertSet& part) {
  return std::ranges::all_of(part.ids(), [&](std::uint32_t id) { return all.contains(id); });
}

const wire::Holding* find(const wire::Holdings* holdings, const LayerKey& key) {
  if (holdings == nullptr) return nullptr;
  const auto found = std::ranges::find_if(holdings->entries, [&](const wire::Holding& entry) {
    return entry.layer_id == key.id && entry.group == key.group;
  });
  return found == holdings->entries.end() ? nullptr : &*found;
}

void wait_for(int fd, short events, TimePoint deadline) {
  pollfd entry{.fd = fd, .events = events, .revents = 0};
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - monotonic_now()).count();
  ::poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 1000)));
}

// One upload on one connection.
class Transfer {
 public:
  Transfer(Link& link, TimePoint deadline) : link_(link), deadline_(deadline) {}

  Status run(ByteSpan slice) {
    for (std::size_t offset = 0; offset < slice.size() && !answered_;) {
      const ByteSpan part = slice.subspan(offset, std::min<std::size_t>(wire::kUploadChunkBytes, slice.size() - offset));
      const wire::UploadHead head{.total_bytes = slice.size(), .offset = offset};
      const Bytes prefix = wire::encode_upload_prefix(kUploadRequestId, head, part, link_.checksum());
      KVASIR_TRY(link_.writer.send(*link_.stream, prefix, part));
      offset += part.size();
      while (!answered_ && !link_.writer.idle(*link_.stream)) KVASIR_TRY(step());
    }
    while (!answered_) KVASIR_TRY(step());
    return {};
  }

 private:
  Status step() {
    KVASIR_TRY(link_.writer.flush(*link_.stream));
    KVASIR_TRY(read());
    if (answered_) return {};
    if (monotonic_now() >= deadline_) return retry_elsewhere("it takes the upload too slowly.");
    const bool sending = !link_.writer.idle(*link_.stream);
    if (!link_.stream->buffered_input())
      wait_for(link_.stream->fd(), static_cast<short>(link_.stream->wants() | (sending ? POLLOUT : 0)), deadline_);
    return {};
  }

  Status read() {
    while (!answered_) {
      KVASIR_ASSIGN(const net::FrameReader::State state, link_.reader.read(*link_.stream));
      if (state == net::FrameReader::State::kWouldBlock) return {};
      if (state == net::FrameReader::State::kEnd) return retry_elsewhere("it closed the connection.");
      const net::Frame& frame = link_.reader.frame();
      if (frame.header.type == wire::FrameType::kError) {
        KVASIR_ASSIGN(const wire::ErrorMessage error, wire::decode_error(frame.payload));
        return retry_elsewhere(error.message);
      }
      answered_ = frame.header.type == wire::FrameType::kHoldings && frame.header.request_id == kUploadRequestId;
    }
    return {};
  }

  Link& link_;
  const TimePoint deadline_;
  bool answered_ = false;
};

}  // namespace

std::vector<UploadShare> share_out(std::span<const std::uint32_t> missing, std::span<const UploadOffer> offers) {
  const std::uint64_t n_missing = missing.size();
  std::vector<UploadOffer> rooms(offers.begin(), offers.end());
  std::ranges::stable_sort(rooms, std::ranges::greater{}, &UploadOffer::n_room);
  std::uint64_t total = 0;
  for (UploadOffer& offer : rooms) total += offer.n_room = std::min(offer.n_room, n_missing);
  const std::uint64_t n_shared = std::min(n_missing, total);
  if (n_shared == 0) return {};
  std::vector<std::uint64_t> counts;
  std::uint64_t left = n_shared;
  for (const UploadOffer& offer : rooms) left -= counts.emplace_back(n_shared * offer.n_room / total);
  for (std::size_t i = 0; left > 0; i = (i + 1) % rooms.size())
    if (counts[i] < rooms[i].n_room) ++counts[i], --left;

  std::vector<UploadShare> shares;
  std::size_t next = 0;
  for (std::size_t i = 0; i < rooms.size(); ++i) {
    if (counts[i] == 0) continue;
    const auto run = missing.subspan(next, counts[i]);
    shares.push_back({rooms[i].worker, ExpertSet::from_ids({run.begin(), run.end()})});
    next += counts[i];
  }
  return shares;
}

void Uploader::wait_for_workers() {
  if (waited_) return;
  waited_ = true;
  const TimePoint deadline = monotonic_now() + shared_.options.connect_wait;
  while (monotonic_now() < deadline) {
    bool settled = true;
    {
      const MutexLock lock(shared_.mutex);
      const Fleet& fleet = shared_.fleet;
      for (WorkerIndex w = 0; w < fleet.size(); ++w)
        settled = settled && (fleet.state(w) == WorkerState::kRemoved || fleet.holdings(w) != nullptr || fleet.refused(w) || fleet.failures(w) >= kFailuresSettled);
    }
    if (settled) return;
    std::this_thread::sleep_for(kLookAgain);
  }
}

bool Uploader::any_holds(const LayerKey& key) {
  const MutexLock one(mutex_);
  wait_for_workers();
  const MutexLock lock(shared_.mutex);
  return shared_.fleet.routes()->find(key) != nullptr;
}

std::vector<UploadOffer> Uploader::offers_for(const LayerKey& key, const SliceMaker& slices) {
  std::vector<UploadOffer> offers;
  const MutexLock lock(shared_.mutex);
  const Fleet& fleet = shared_.fleet;
  for (WorkerIndex w = 0; w < fleet.size(); ++w) {
    const wire::Holdings* holdings = fleet.holdings(w);
    // A worker that holds a part of the layer takes no other part of it.
    if (fleet.state(w) != WorkerState::kUp || holdings == nullptr || find(holdings, key) != nullptr) continue;
    const std::uint64_t room = holdings->upload_bytes_free;
    if (room > slices.fixed_bytes) offers.push_back({w, (room - slices.fixed_bytes) / slices.bytes_per_expert});
  }
  return offers;
}

void Uploader::upload_missing(const Layer& layer, const SliceMaker& slices) {
  const MutexLock one(mutex_);
  wait_for_workers();
  const LayerKey key{layer.layer_id, layer.recipe.group};
  std::vector<std::uint32_t> missing;
  {
    const MutexLock lock(shared_.mutex);
    const LayerRoutes* routes = shared_.fleet.routes()->find(key);
    for (std::uint32_t e = 0; e < layer.recipe.n_expert; ++e)
      if (routes == nullptr || routes->replicas(e).empty()) missing.push_back(e);
  }
  if (missing.empty()) return;
  const std::vector<UploadShare> shares = share_out(missing, offers_for(key, slices));
  std::size_t n_shared = 0;
  for (const UploadShare& share : shares) n_shared += share.experts.size();
  if (n_shared < missing.size() && !no_room_said_) {
    no_room_said_ = true;
    shared_.log(std::format("no worker has room for {} of the {} experts of layer {}, nor perhaps for others: they are computed "
                            "here; start workers with more --memory.",
                            missing.size() - n_shared, layer.recipe.n_expert, layer.layer));
  }
  const std::uint64_t bytes = n_shared * slices.bytes_per_expert;
  if (bytes >= kWorthTelling)
    shared_.log(std::format("uploading layer {}: {} experts to {} workers, {:.1f} GB.", layer.layer, n_shared, shares.size(),
                            static_cast<double>(bytes) / 1e9));
  // One after the other: this machine's own line is the narrowest, and one copy of a share the
  // most that is in memory.
  for (const UploadShare& share : shares) {
    const Result<Bytes> slice = slices.make(share.experts);
    Status done = slice ? upload(share, *slice) : Status(std::unexpected(slice.error()));
    if (done) done = wait_until_seen(key, share);
    if (!done)
      shared_.log(std::format("experts {} of layer {} could not be uploaded to worker {}: {}", format_ranges(share.experts),
                              layer.layer, shared_.name(share.worker), done.error().message));
  }
}

Result<std::unique_ptr<Link>> Uploader::connect(WorkerIndex worker) {
  Peer peer;
  {
    const MutexLock lock(shared_.mutex);
    peer.where = shared_.slots[worker].where;
    peer.name = shared_.slots[worker].name;
  }
  peer.grants = shared_.options.grants ? &*shared_.options.grants : nullptr;
  if (shared_.options.relay && !peer.where.relay.empty()) {
    KVASIR_ASSIGN(peer.relay, net::RelayDialer::create(*shared_.options.relay));
    KVASIR_ASSIGN(peer.relay_addresses, net::resolve(peer.relay->dial_address()));
  }
  if (has_way(peer, Way::kDirect)) {
    KVASIR_ASSIGN(peer.addresses, net::resolve({peer.where.host, peer.where.port}));
  }
  if (!peer.where.fingerprint.empty()) {
    KVASIR_ASSIGN(peer.fingerprint, net::parse_fingerprint(peer.where.fingerprint));
    if (!tls_) {
      KVASIR_ASSIGN(tls_, net::TlsContext::client());
    }
  }
  Dial dial(peer, shared_.hello(peer.where), tls_ ? &*tls_ : nullptr, monotonic_now());
  std::vector<pollfd> fds;
  while (true) {
    switch (dial.step(monotonic_now())) {
      case Handshake::State::kPending: {
        fds.clear();
        TimePoint wake = monotonic_now() + kHandshakeMax / 50;
        dial.gather(fds, wake);
        const auto wait = std::chrono::ceil<std::chrono::milliseconds>(wake - monotonic_now()).count();
        ::poll(fds.data(), fds.size(), static_cast<int>(std::max<std::int64_t>(wait, 0)));
        break;
      }
      case Handshake::State::kDone: return dial.take_link();
      case Handshake::State::kFailed:
      case Handshake::State::kRefused: return retry_elsewhere(dial.error());
    }
  }
}

Status Uploader::upload(const UploadShare& share, ByteSpan slice) {
  if (slice.size() > wire::kUploadBytesMax) return fix_input("the slice is over the limit of an upload; use more workers.");
  KVASIR_ASSIGN(const std::unique_ptr<Link> link, connect(share.worker));
  const TimePoint deadline =
      monotonic_now() + kUploadFixedMax + std::chrono::milliseconds(slice.size() / kSlowestUploadBytesPerMs);
  KVASIR_TRY(Transfer(*link, deadline).run(slice));
  add(shared_.stats.bytes_sent, slice.size());
  return {};
}

Status Uploader::wait_until_seen(const LayerKey& key, const UploadShare& share) {
  const TimePoint deadline = monotonic_now() + kHoldingsSeenMax;
  while (monotonic_now() < deadline) {
    {
      const MutexLock lock(shared_.mutex);
      const wire::Holding* held = find(shared_.fleet.holdings(share.worker), key);
      if (held != nullptr && contains(held->experts, share.experts)) return {};
    }
    std::this_thread::sleep_for(kLookAgain);
  }
  return retry_elsewhere("it took the experts but does not list them.");
}

}  // namespace kvasir::dispatch
