// Connection, second half: uploads, and what changes in the store.

#include <format>

#include "spdlog/spdlog.h"
#include "worker/connection.h"

namespace kvasir::worker {

using wire::ErrorCode;
using wire::FrameType;

Status Connection::on_upload(const net::Frame& frame) {
  const std::uint64_t request_id = frame.header.request_id;
  const Result<wire::UploadView> part = wire::decode_upload(frame.payload);
  if (!part) return malformed(frame, part.error().message);
  if (request_id == 0) return malformed(frame, "An UPLOAD needs a request id.");
  const wire::UploadHead& head = part->head;
  if (!upload_ && request_id == refused_upload_ && head.offset > 0) return {};  // sent before our ERROR was read
  if (!upload_) {
    if (head.offset != 0) return malformed(frame, "An UPLOAD begins at offset 0.");
    if (core_.draining)
      return refuse_upload(request_id, {ErrorCode::kDraining, "This worker is shutting down: use a replica."});
    // Our own recipes may hold what has to make room.
    for (auto& [id, bound] : recipes_) bound.recipe.layer.reset();
    auto slice = core_.store.begin_upload(head.total_bytes);
    find_layers();
    if (!slice) return refuse_upload(request_id, std::move(slice).error());
    upload_.emplace(request_id, *std::move(slice), TimePoint{});
  }
  IncomingSlice& slice = upload_->slice;
  if (request_id != upload_->request_id || head.total_bytes != slice.total_bytes() || head.offset != slice.received_bytes())
    return malformed(frame, "The parts of an UPLOAD come in order, and one upload at a time.");
  slice.append(part->bytes);
  upload_->deadline = monotonic_now() + core_.options.timeouts.stall;
  if (!slice.complete()) return {};

  IncomingSlice complete = std::move(slice);
  upload_.reset();
  if (auto refusal = core_.store.finish_upload(std::move(complete))) return refuse_upload(request_id, *std::move(refusal));
  core_.log_of_peer(spdlog::level::info, std::format("{}: uploaded {} bytes of experts", peer_, head.total_bytes));
  return send(wire::encode_frame(FrameType::kHoldings, request_id, core_.store.holdings(), checksum()));
}

Status Connection::refuse_upload(std::uint64_t request_id, wire::ErrorMessage why) {
  upload_.reset();
  refused_upload_ = request_id;
  core_.log_of_peer(spdlog::level::info, std::format("{}: refused an upload: {}", peer_, why.message));
  return send_error(request_id, why.code, std::move(why.message));
}

Status Connection::drop_stalled_upload() {
  return refuse_upload(upload_->request_id, {ErrorCode::kNoRoom, "The upload stood still, and its memory is wanted."});
}

Status Connection::check_fit(const wire::Recipe& recipe, const HeldLayer& layer) {
  if (recipe.group != layer.group || recipe.n_expert != layer.n_expert)
    return fix_input(std::format("Layer {} has {} experts in group {}, which the recipe does not agree with.", layer.layer,
                                 layer.n_expert, static_cast<int>(layer.group)));
  return ffn::Engine::check(recipe, layer.tensors);
}

void Connection::find_layers() {
  for (auto& [id, bound] : recipes_) {
    bound.recipe.layer = core_.store.find(bound.layer_id);
    // Another upload under the same id need not have the shape that was checked.
    if (bound.recipe.layer && !check_fit(bound.recipe.recipe, *bound.recipe.layer)) bound.recipe.layer.reset();
  }
}

Status Connection::follow_store() {
  store_version_ = core_.store.version();
  find_layers();
  return send(wire::encode_frame(FrameType::kHoldings, 0, core_.store.holdings(), checksum()));
}

}  // namespace kvasir::worker
