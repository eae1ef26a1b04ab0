#include "worker/live_store.h"

#include <algorithm>
#include <cstring>
#include <format>
#include <thread>

#include "gguf/moe_model.h"
#include "worker/limits.h"
#include "worker/slice_loader.h"

namespace kvasir::worker {
namespace {

using wire::ErrorCode;
using wire::ErrorMessage;

std::unexpected<ErrorMessage> bad(std::string why) { return std::unexpected(ErrorMessage{ErrorCode::kBadUpload, std::move(why)}); }
ErrorMessage no_room(std::string why) { return {ErrorCode::kNoRoom, std::move(why)}; }

bool contains(const ExpertSet& all, const ExpertSet& part) {
  return std::ranges::all_of(part.ids(), [&](std::uint32_t id) { return all.contains(id); });
}

// What HOLDINGS can say, so that one upload cannot make the list unreadable for everyone.
bool fits_holdings(const gguf::LayerExperts& layer) {
  return layer.layer < wire::kLayersMax && layer.n_expert <= wire::kExpertsMax && layer.held.ranges().size() <= wire::kRangesMax;
}

}  // namespace

void IncomingSlice::append(ByteSpan part) {
  std::memcpy(buffer_.get() + received_, part.data(), part.size());
  received_ += part.size();
}

LiveStore::Uploaded::Uploaded(LiveStore& owner, HeldLayerPtr held, MemoryBudget::Share taken)
    : store(owner), share(std::move(taken)), layer(std::move(held)) {
  store.uploaded_bytes_ += layer->bytes;
}

LiveStore::Uploaded::~Uploaded() {
  ++store.freed_;  // before the tensors go
  store.uploaded_bytes_ -= layer->bytes;
}

LiveStore::LiveStore(SliceStore files, std::uint64_t memory_bytes, ggml_backend_buffer_type_t buffer_type)
    : files_(std::move(files)),
      memory_bytes_(memory_bytes),
      buffer_type_(buffer_type),
      memory_(memory_bytes > files_.bytes() ? memory_bytes - files_.bytes() : 0),
      slots_(kUploadsMax) {}

HeldLayerPtr LiveStore::find_locked(const wire::LayerId& layer_id) const {
  if (HeldLayerPtr layer = files_.find(layer_id)) return layer;
  const auto found = std::ranges::find(uploaded_, layer_id, &HeldLayer::layer_id);
  return found == uploaded_.end() ? nullptr : *found;
}

HeldLayerPtr LiveStore::find(const wire::LayerId& layer_id) const {
  const MutexLock lock(mutex_);
  return find_locked(layer_id);
}

wire::Holdings LiveStore::holdings() const {
  wire::Holdings holdings = files_.holdings();
  const MutexLock lock(mutex_);
  for (const HeldLayerPtr& layer : uploaded_)
    holdings.entries.push_back({layer->layer_id, layer->layer, layer->group, layer->n_expert, layer->n_embd, layer->experts});
  if (memory_bytes_ != 0) {
    // A slice needs its length twice: as it came, and loaded.
    const std::uint64_t room = memory_.left() + uploaded_bytes_;
    const std::uint64_t slice = room > kUploadSlackBytes ? (room - kUploadSlackBytes) / 2 : 0;
    holdings.upload_bytes_free = std::min(slice, wire::kUploadBytesMax);
  }
  return holdings;
}

void LiveStore::subscribe(const Wake& wake) {
  const MutexLock lock(mutex_);
  subscribers_.push_back(&wake);
}

void LiveStore::unsubscribe(const Wake& wake) {
  const MutexLock lock(mutex_);
  std::erase(subscribers_, &wake);
}

void LiveStore::changed_locked() {
  ++version_;
  for (const Wake* wake : subscribers_) wake->raise();
}

// Evicts those used longest ago until `bytes` are free or about to be.
void LiveStore::evict_for(std::uint64_t bytes) {
  const MutexLock lock(mutex_);
  std::uint64_t kept = 0;
  for (const HeldLayerPtr& layer : uploaded_) kept += layer->bytes;
  bool any = false;
  while (!uploaded_.empty() && memory_.left() + uploaded_bytes_ - std::min(kept, uploaded_bytes_.load()) < bytes) {
    const auto oldest = std::ranges::min_element(uploaded_, {}, [](const HeldLayerPtr& layer) { return layer->used_ns.load(); });
    kept -= (*oldest)->bytes;
    uploaded_.erase(oldest);
    any = true;
  }
  if (any) changed_locked();
}

MemoryBudget::Share LiveStore::make_room(std::uint64_t bytes) {
  if (MemoryBudget::Share share = memory_.take(bytes)) return share;
  if (memory_.left() + uploaded_bytes_ < bytes) return {};  // evicting everything would not help
  evict_for(bytes);
  // Connections let go of the layers when they wake, or have answered what they compute.
  const TimePoint deadline = monotonic_now() + kEvictionMax;
  while (true) {
    if (MemoryBudget::Share share = memory_.take(bytes)) return share;
    if (monotonic_now() >= deadline) return {};
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::expected<IncomingSlice, LiveStore::Refusal> LiveStore::begin_upload(std::uint64_t total_bytes) {
  if (memory_bytes_ == 0)
    return std::unexpected(no_room("This worker takes no uploads: start it with --memory to offer room for them."));
  IncomingSlice slice;
  slice.slot_ = slots_.take(1);
  if (!slice.slot_) return std::unexpected(no_room(std::format("{} uploads are under way here already: try another worker.", kUploadsMax)));
  slice.layer_share_ = make_room(2 * total_bytes + kUploadSlackBytes);  // total_bytes <= wire::kUploadBytesMax
  if (!slice.layer_share_)
    return std::unexpected(no_room(std::format("There is no room for an upload of {} bytes: start the worker with more --memory.", total_bytes)));
  slice.buffer_share_ = slice.layer_share_.split(total_bytes);
  slice.buffer_ = std::make_unique_for_overwrite<std::byte[]>(total_bytes);
  slice.total_ = total_bytes;
  return slice;
}

std::expected<HeldLayerPtr, LiveStore::Refusal> LiveStore::load(const IncomingSlice& slice) const {
  auto source = gguf::make_memory_source("the upload", ByteSpan(slice.buffer_.get(), slice.total_));
  Result<gguf::ModelFiles> files = gguf::ModelFiles::from_source(std::move(source));
  if (!files) return bad(files.error().message);
  const Result<gguf::MoeModel> model = gguf::MoeModel::from_files(*std::move(files));
  if (!model) return bad(model.error().message);
  if (model->kind() != gguf::FileKind::kSlice || model->layers().size() != 1 || model->layers()[0].held.empty() ||
      model->layers()[0].tensors.size() != model->files().tensors().size())
    return bad("The upload is not a slice of the experts of one layer.");
  const gguf::LayerExperts& layer = model->layers()[0];
  if (!fits_holdings(layer)) return bad("The layer's number, or its number of experts, is over the limit.");
  const Result<wire::LayerId> id = model->layer_id(layer);
  if (!id) return bad(id.error().message);
  LayerPlan plan(*model, layer, *id);
  const Result<std::uint64_t> bytes = plan.lay_out(buffer_type_);
  if (!bytes) return bad(bytes.error().message);
  if (*bytes > slice.layer_share_.bytes()) return bad("The experts need more memory than the slice is long.");
  Result<HeldLayerPtr> held = plan.load(buffer_type_, /*verify=*/true);
  if (!held) return bad(held.error().message);
  if ((*held)->n_embd == 0 || (*held)->n_embd > wire::kWidthMax) return bad("The rows are wider than the limit.");
  return *std::move(held);
}

std::optional<LiveStore::Refusal> LiveStore::insert(HeldLayerPtr layer, MemoryBudget::Share share) {
  const MutexLock lock(mutex_);
  if (const HeldLayerPtr held = find_locked(layer->layer_id)) {
    if (contains(held->experts, layer->experts)) return std::nullopt;
    return no_room(std::format("This worker holds other experts of layer {} already: give these to another.", held->layer));
  }
  std::size_t n_ranges = layer->experts.ranges().size(), n_entries = 1;
  for (const HeldLayerPtr& other : files_.layers()) n_ranges += other->experts.ranges().size(), ++n_entries;
  for (const HeldLayerPtr& other : uploaded_) n_ranges += other->experts.ranges().size(), ++n_entries;
  if (n_entries > wire::kHoldingsMax || n_ranges > wire::kHoldingsRangesMax)
    return no_room("This worker holds as many layers as it can name: use another.");
  layer->used_ns = monotonic_now().time_since_epoch().count();
  share.shrink_to(layer->bytes);
  auto uploaded = std::make_shared<Uploaded>(*this, std::move(layer), std::move(share));
  uploaded_.push_back(HeldLayerPtr(uploaded, uploaded->layer.get()));
  changed_locked();
  return std::nullopt;
}

std::optional<LiveStore::Refusal> LiveStore::finish_upload(IncomingSlice slice) {
  std::expected<HeldLayerPtr, Refusal> layer = load(slice);
  if (!layer) return std::move(layer).error();
  return insert(*std::move(layer), std::move(slice.layer_share_));
}

}  // namespace kvasir::worker
