// The experts a worker holds now: those of its files, for good, and those that backbones have
// uploaded, of which the ones used longest ago make room for new ones.
//
// Any thread. `memory` bounds the experts held, the uploads being received and the experts
// being loaded from them together; an evicted layer counts until its last user lets go of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <expected>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "worker/memory_budget.h"
#include "worker/peer_io.h"
#include "worker/slice_store.h"

namespace kvasir::worker {

// A slice on its way in. Its memory is taken; it is given back when this goes.
class IncomingSlice {
 public:
  std::uint64_t total_bytes() const { return total_; }
  std::uint64_t received_bytes() const { return received_; }
  bool complete() const { return received_ == total_; }
  // The bytes that follow those received; the caller has checked that they fit.
  void append(ByteSpan part);

 private:
  friend class LiveStore;
  MemoryBudget::Share slot_, buffer_share_, layer_share_;
  std::unique_ptr<std::byte[]> buffer_;
  std::uint64_t total_ = 0;
  std::uint64_t received_ = 0;
};

class LiveStore {
 public:
  using Refusal = wire::ErrorMessage;

  // `memory_bytes` 0: takes no uploads.
  LiveStore(SliceStore files, std::uint64_t memory_bytes, ggml_backend_buffer_type_t buffer_type);

  const SliceStore& files() const { return files_; }
  std::uint64_t bytes() const { return files_.bytes() + uploaded_bytes_; }
  HeldLayerPtr find(const wire::LayerId& layer_id) const;  // null if not held
  wire::Holdings holdings() const;

  // Changes whenever holdings() does.
  std::uint64_t version() const { return version_; }
  // Woken then, until it is unsubscribed.
  void subscribe(const Wake& wake);
  void unsubscribe(const Wake& wake);

  // Takes the memory for a slice of this length, giving up older uploads if need be. The caller
  // holds no HeldLayerPtr meanwhile, which could be one of theirs.
  std::expected<IncomingSlice, Refusal> begin_upload(std::uint64_t total_bytes);
  // Checks and loads a complete slice. What it says of itself, but its layer id, is verified.
  std::optional<Refusal> finish_upload(IncomingSlice slice);

  // Counts layers whose tensors are about to be freed: graphs made before the last one may
  // point to them.
  std::uint64_t freed() const { return freed_; }

 private:
  // Keeps the books of one uploaded layer, until nobody uses it any more.
  struct Uploaded {
    Uploaded(LiveStore& store, HeldLayerPtr held, MemoryBudget::Share taken);
    ~Uploaded();
    Uploaded(const Uploaded&) = delete;
    Uploaded& operator=(const Uploaded&) = delete;
    LiveStore& store;
    MemoryBudget::Share share;  // goes last
    HeldLayerPtr layer;
  };

  MemoryBudget::Share make_room(std::uint64_t bytes);
  void evict_for(std::uint64_t bytes);
  std::expected<HeldLayerPtr, Refusal> load(const IncomingSlice& slice) const;
  std::optional<Refusal> insert(HeldLayerPtr layer, MemoryBudget::Share share);
  HeldLayerPtr find_locked(const wire::LayerId& layer_id) const KVASIR_REQUIRES(mutex_);
  void changed_locked() KVASIR_REQUIRES(mutex_);

  const SliceStore files_;
  const std::uint64_t memory_bytes_;
  const ggml_backend_buffer_type_t buffer_type_;
  MemoryBudget memory_;  // what the files leave
  MemoryBudget slots_;   // uploads at once
  std::atomic<std::uint64_t> uploaded_bytes_ = 0;  // of all Uploaded, evicted ones that are in use among them
  std::atomic<std::uint64_t> freed_ = 0;
  std::atomic<std::uint64_t> version_ = 1;

  mutable Mutex mutex_;
  std::list<HeldLayerPtr> uploaded_ KVASIR_GUARDED_BY(mutex_);
  std::vector<const Wake*> subscribers_ KVASIR_GUARDED_BY(mutex_);
};

}  // namespace kvasir::worker
