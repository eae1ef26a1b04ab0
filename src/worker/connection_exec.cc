// Connection, third part: requests, from EXEC to the rows of their answers.

#include <algorithm>
#include <format>

#include "spdlog/spdlog.h"
#include "worker/connection.h"

namespace kvasir::worker {

using wire::ErrorCode;

Status Connection::on_exec(const net::Frame& frame) {
  const std::uint64_t request_id = frame.header.request_id;
  core_.stats.bytes_received += frame.payload.size();
  if (core_.draining) {
    ++core_.stats.requests_refused;
    return send_error(request_id, ErrorCode::kDraining, "This worker is shutting down: use a replica.");
  }
  // The usual case: nothing else is on its way and the engine is free.
  const bool alone = pending_.empty() && !reader_.mid_frame() && !stream_->buffered_input();
  if (alone) {
    ComputeGate::Ticket ticket(wake_.fd());
    if (core_.gate.try_enter(ticket)) return answer(request_id, frame.payload, ticket);
  }

  MemoryBudget::Share share = core_.budget.take(frame.payload.size());
  if (share) {
    // One request of a connection at a time: run_pending() looks at the first only.
    std::shared_ptr<MergeableWork> work = pending_.empty() ? mergeable(frame.payload) : nullptr;
    Pending& pending = pending_.emplace_back(request_id, wake_.fd(), std::move(share));
    if (!work) pending.payload.assign(frame.payload.begin(), frame.payload.end());
    pending.work = std::move(work);
    if (core_.gate.join(pending.ticket, expected_time(frame.payload), pending.work)) return {};
    pending_.pop_back();
  }
  ++core_.stats.requests_refused;
  ++core_.stats.requests_busy;
  return send_error(request_id, ErrorCode::kBusy,
                    std::format("{} requests wait here already, for {} ms: use a replica.", core_.gate.waiting(),
                                std::chrono::ceil<std::chrono::milliseconds>(core_.gate.waiting_time()).count()));
}

// 0 for one that is malformed, which is said when its turn comes. An expert's pairs follow each other in what
// backbones send; where they do not, too many are counted and the request is taken for a slower one.
Nanos Connection::expected_time(ByteSpan payload) const {
  const Result<wire::ExecView> view = wire::decode_exec(payload);
  if (!view) return Nanos(0);
  std::size_t n_experts = 0;
  for (std::size_t i = 0; i < view->head.n_pairs; ++i) n_experts += i == 0 || view->pair(i).expert != view->pair(i - 1).expert;
  return core_.stats.costs.predict(view->head.numerics, view->head.n_pairs, n_experts);
}

std::shared_ptr<MergeableWork> Connection::mergeable(ByteSpan payload) {
  const Result<wire::ExecView> view = wire::decode_exec(payload);
  if (!view || !may_merge(view->head, core_.options.merged_pairs_max) ||
      (view->head.numerics != wire::Numerics::kFast && !same_numerics_))
    return nullptr;  // if it is not sound, that is found in its turn
  const auto bound = recipes_.find(view->head.recipe_id);
  if (bound == recipes_.end() || !bound->second.recipe.layer) return nullptr;
  return mergeable_work(core_.budget, bound->second.layer_id, bound->second.recipe.recipe, payload);
}

Status Connection::on_cancel(std::uint64_t request_id) {
  const auto found = std::ranges::find(pending_, request_id, &Pending::request_id);
  if (found == pending_.end()) return {};  // answered, or being answered
  core_.gate.withdraw(found->ticket);
  pending_.erase(found);
  ++core_.stats.requests_cancelled;
  return send_error(request_id, ErrorCode::kCancelled, "The request was cancelled.");
}

bool Connection::pending_ready() const {
  return !pending_.empty() &&
         (core_.gate.has_turn(pending_.front().ticket) || core_.gate.delivered(pending_.front().ticket));
}

Status Connection::run_pending() {
  Pending& next = pending_.front();
  Status answered;
  if (core_.gate.has_turn(next.ticket)) {
    answered = answer(next.request_id, next.bytes(), next.ticket);
  } else {  // taken along, and done
    MergeableWork& work = *next.work;
    answered = work.refusal ? send_refusal(next.request_id, work.request, *std::move(work.refusal))
                            : send_last_rows(next.request_id, work.view.head, next.bytes().size(), work.request, work.took);
  }
  pending_.pop_front();
  return answered;
}

Status Connection::send_refusal(std::uint64_t request_id, ExecRequest& request, wire::ErrorMessage why) {
  request.release();
  ++core_.stats.requests_refused;
  if (why.code == ErrorCode::kBusy) ++core_.stats.requests_busy;
  return send_error(request_id, why.code, std::move(why.message));
}

// Computes and sends. `ticket` has the gate's turn, which is given on once the engine is done.
Status Connection::answer(std::uint64_t request_id, ByteSpan payload, ComputeGate::Ticket& ticket) {
  const ComputeGate::Guard guard(core_.gate, ticket);
  const auto refuse = [&](ErrorCode code, std::string why) {
    core_.gate.withdraw(ticket);
    return send_refusal(request_id, request_, {code, std::move(why)});
  };
  const Result<wire::ExecView> view = wire::decode_exec(payload);
  if (!view) {
    if (refuse(ErrorCode::kMalformed, view.error().message)) linger(*stream_, core_.options.timeouts.linger);
    return std::unexpected(view.error());
  }
  if (view->head.numerics != wire::Numerics::kFast && !same_numerics_)
    return refuse(ErrorCode::kNumerics, "This connection was made for numerics class fast; the ids differ.");
  if (core_.store.version() != store_version_) find_layers();  // follow_store() comes when the gate is left
  const auto bound = recipes_.find(view->head.recipe_id);
  if (bound == recipes_.end())
    return refuse(ErrorCode::kUnknownRecipe, std::format("No LAYER_RECIPE {} stands.", view->head.recipe_id));
  const BoundRecipe& recipe = bound->second.recipe;
  if (!recipe.layer) return refuse(ErrorCode::kUnknownLayer, kLayerNotHeld);
  recipe.layer->used_ns = monotonic_now().time_since_epoch().count();
  if (auto refusal = request_.prepare(*view, recipe)) return refuse(refusal->code, std::move(refusal->message));

  // Graphs are cached by the addresses of tensors, which an evicted layer has left to others.
  if (const std::uint64_t freed = core_.store.freed(); freed != core_.freed_seen) {
    core_.engine->forget_graphs();
    core_.freed_seen = freed;
  }
  TakenAlong others(core_.gate, request_, *view, recipe, core_.options.merged_pairs_max);
  const std::uint32_t n_pairs = view->head.n_pairs + others.pairs();
  const std::size_t n_experts = others.empty() ? request_.experts() : others.experts(request_);
  core_.gate.expect(ticket, core_.stats.costs.predict(view->head.numerics, n_pairs, n_experts));
  core_.stats.requests_merged += others.size();
  Nanos took{};
  while (true) {
    const TimePoint start = monotonic_now();
    const Status computed = others.empty() ? request_.compute(*core_.engine) : others.compute(*core_.engine, request_, core_.batch);
    took += monotonic_now() - start;
    if (!computed) {
      core_.log_of_peer(spdlog::level::err, std::format("{}: {}", peer_, computed.error().message));
      return refuse(ErrorCode::kInternal, computed.error().message);
    }
    if (request_.complete()) break;
    // The peer reads this piece while the next one is computed; one that does not read holds nobody up.
    KVASIR_TRY(send_rows(request_id, view->head, request_.finish(), request_.answer_rows(), took, /*wait=*/false));
  }
  core_.gate.withdraw(ticket);
  core_.stats.count_compute(view->head.numerics, n_pairs, n_experts, took);
  return send_last_rows(request_id, view->head, payload.size(), request_, took);
}

Status Connection::send_last_rows(std::uint64_t request_id, const wire::ExecHead& exec, std::size_t request_bytes,
                                  ExecRequest& request, Nanos computed) {
  ++core_.stats.requests;
  if (core_.options.served) {
    const std::uint64_t answer_bytes = request.answer_rows() * wire::row_bytes(exec.result_type, exec.n_embd).value_or(0);
    core_.options.served->add(backbone_, {exec.n_pairs, exec.n_rows, request_bytes + answer_bytes});
  }
  const Status sent = send_rows(request_id, exec, request.finish(), request.answer_rows(), computed, /*wait=*/true);
  request.release();
  ++n_answered_;
  if (core_.options.spin_us > 0) spin_until_ = monotonic_now() + std::chrono::microseconds(core_.options.spin_us);
  return sent;
}

Status Connection::send_rows(std::uint64_t request_id, const wire::ExecHead& exec, const ExecRequest::Rows& rows,
                             std::uint32_t total_rows, Nanos computed, bool wait) {
  if (rows.count == 0) return {};
  wire::ResultHead head{.row_type = exec.result_type, .n_embd = exec.n_embd, .first_row = rows.first,
                        .total_rows = total_rows,
                        .compute_us = static_cast<std::uint32_t>(std::min<std::int64_t>(computed.count() / 1000, UINT32_MAX))};
  const std::size_t row_bytes = rows.bytes.size() / rows.count;
  const std::uint32_t rows_max = wire::result_rows_at_once(head.row_type, head.n_embd);
  const std::uint32_t end = rows.first + rows.count;
  while (head.first_row < end) {
    head.n_rows = std::min(rows_max, end - head.first_row);
    const ByteSpan part = rows.bytes.subspan((head.first_row - rows.first) * row_bytes, head.n_rows * row_bytes);
    const bool more = head.first_row + head.n_rows < head.total_rows;
    const Bytes prefix = wire::encode_result_prefix(request_id, head, part, more, checksum());
    // A queue near its limit is a peer that reads slower than this worker computes: it sets the pace then.
    if (wait || writer_.queued_bytes() + part.size() + prefix.size() > net::FrameWriter::kQueuedBytesMax) {
      KVASIR_TRY(flush_whole(*stream_, writer_, core_.options.timeouts));
      KVASIR_TRY(send_whole(*stream_, writer_, core_.options.timeouts, prefix, part));
    } else {
      KVASIR_TRY(writer_.send(*stream_, prefix, part));
    }
    head.first_row += head.n_rows;
  }
  core_.stats.bytes_sent += rows.bytes.size();
  return {};
}

}  // namespace kvasir::worker
