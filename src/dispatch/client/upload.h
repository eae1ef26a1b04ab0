// Hands workers that offer memory the experts nobody holds, over connections of its own.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "dispatch/client/handshake.h"
#include "dispatch/client/shared.h"

namespace kvasir::dispatch {

// A worker that takes uploads, and how many of the layer's experts it has room for.
struct UploadOffer {
  WorkerIndex worker = 0;
  std::uint64_t n_room = 0;
};
struct UploadShare {
  WorkerIndex worker = 0;
  ExpertSet experts;
};
// Shares `missing` (ascending) out in runs, in proportion to the room; what no room is left for
// is nobody's. No share is empty.
std::vector<UploadShare> share_out(std::span<const std::uint32_t> missing, std::span<const UploadOffer> offers);

class Uploader {
 public:
  explicit Uploader(Shared& shared) : shared_(shared) {}

  bool any_holds(const LayerKey& key);
  // One layer at a time; a second caller waits.
  void upload_missing(const Layer& layer, const SliceMaker& slices);

 private:
  void wait_for_workers() KVASIR_REQUIRES(mutex_);
  std::vector<UploadOffer> offers_for(const LayerKey& key, const SliceMaker& slices);
  Status upload(const UploadShare& share, ByteSpan slice) KVASIR_REQUIRES(mutex_);
  Result<std::unique_ptr<Link>> connect(WorkerIndex worker) KVASIR_REQUIRES(mutex_);
  Status wait_until_seen(const LayerKey& key, const UploadShare& share);

  Shared& shared_;
  Mutex mutex_;
  bool waited_ KVASIR_GUARDED_BY(mutex_) = false;
  bool no_room_said_ KVASIR_GUARDED_BY(mutex_) = false;
  std::optional<net::TlsContext> tls_ KVASIR_GUARDED_BY(mutex_);
};

}  // namespace kvasir::dispatch
