#include "worker/raw_session.h"

#include <algorithm>
#include <format>
#include <optional>

#include "wire/raw_framing.h"

namespace kvasir::worker {
namespace {

constexpr std::size_t kReadAtOnceBytes = 64 * 1024;

// Waits for the turn; the peer of this framing has nothing else to say meanwhile.
Status take_turn(ServerCore& core, ComputeGate::Ticket& ticket, const Wake& wake) {
  if (!core.gate.join(ticket)) return retry_later("the queue is full.");
  while (!core.gate.has_turn(ticket)) {
    wait_for(nullptr, /*reading=*/false, &wake, monotonic_now() + std::chrono::seconds(1));
  }
  return {};
}

class RawSession {
 public:
  // `first`: bytes already read, at most kReadAtOnceBytes.
  RawSession(ServerCore& core, net::Stream& stream, const Wake& wake, BoundRecipe bound, ByteSpan first)
      : core_(core), stream_(stream), wake_(wake), bound_(std::move(bound)), parser_(new_parser()), buffer_(kReadAtOnceBytes) {
    std::ranges::copy(first, buffer_.begin());
    unread_ = ByteSpan(buffer_).first(first.size());
  }

  // True: one request answered. False: the peer has closed, or this worker drains.
  Result<bool> serve_one() {
    KVASIR_ASSIGN(const bool open, read_head());
    if (!open) return false;
    const std::uint64_t answer_bytes = parser_.answer_bytes();
    const MemoryBudget::Share share = core_.budget.take(parser_.request_bytes() + answer_bytes);
    if (!share) return retry_later("there is no memory for its request now.");
    KVASIR_TRY(read_body());
    core_.stats.bytes_received += parser_.request_bytes();

    const wire::RawRequest& request = parser_.request();
    std::vector<ffn::LocalPair> pairs(request.answer_rows());
    for (std::size_t i = 0; i < pairs.size(); ++i)
      pairs[i] = {static_cast<std::uint32_t>(i / request.n_used), static_cast<std::uint32_t>(request.sel[i])};
    const std::size_t n_embd = bound_.recipe.n_embd;
    float* out = out_.room_for(pairs.size() * n_embd);
    KVASIR_TRY(compute({request.cur.data(), n_embd, request.n_tokens}, pairs, out));
    KVASIR_TRY(send_whole(stream_, writer_, core_.options.timeouts, std::as_bytes(std::span(out, pairs.size() * n_embd))));
    core_.stats.bytes_sent += answer_bytes;
    ++core_.stats.requests;
    out_.trim(kScratchBytesKept);
    if (parser_.request_bytes() > kScratchBytesKept) parser_ = new_parser();
    return true;
  }

 private:
  wire::RawParser new_parser() const { return {bound_.recipe.n_embd, bound_.layer->tensors.n_local}; }

  // Gives the parser what is there. False: the stream would block.
  Result<bool> feed_some() {
    if (unread_.empty()) {
      KVASIR_ASSIGN(const net::IoResult got, stream_.read_some(buffer_));
      if (got.state == net::IoState::kEnd) {
        if (parser_.mid_request()) return retry_elsewhere("it closed the connection in the middle of a request.");
        ended_ = true;
        return true;
      }
      unread_ = ByteSpan(buffer_).first(got.bytes);
      if (unread_.empty()) return false;
    }
    KVASIR_ASSIGN(const std::size_t taken, parser_.feed(unread_));
    unread_ = unread_.subspan(taken);
    return true;
  }

  // An idle peer may wait as long as it likes; one that has begun may not.
  Result<bool> read_head() {
    std::optional<TimePoint> deadline;
    while (true) {
      if (core_.draining && !parser_.mid_request() && unread_.empty()) return false;
      KVASIR_ASSIGN(const bool fed, feed_some());
      if (ended_) return false;
      if (fed && parser_.head_known()) return true;  // until it is fed, it stands at the request before
      if (!deadline && parser_.mid_request()) deadline = monotonic_now() + core_.options.timeouts.stall;
      if (deadline && monotonic_now() > *deadline) return retry_elsewhere("it stopped in the middle of a request.");
      if (!fed) wait_for(&stream_, /*reading=*/true, &wake_, deadline.value_or(monotonic_now() + std::chrono::hours(1)));
    }
  }

  Status read_body() {
    const TimePoint deadline = monotonic_now() + time_allowed(core_.options.timeouts, parser_.request_bytes());
    while (!parser_.complete()) {
      KVASIR_ASSIGN(const bool fed, feed_some());
      if (parser_.complete()) break;
      if (monotonic_now() > deadline) return retry_elsewhere("it stopped in the middle of a request.");
      if (!fed) wait_for(&stream_, /*reading=*/true, nullptr, deadline);
    }
    return {};
  }

  Status compute(ffn::RowsView rows, std::span<const ffn::LocalPair> pairs, float* out) {
    ComputeGate::Ticket ticket(wake_.fd());
    const ComputeGate::Guard guard(core_.gate, ticket);
    if (Status turn = take_turn(core_, ticket, wake_); !turn) {
      ++core_.stats.requests_busy;
      return turn;
    }
    const TimePoint start = monotonic_now();
    const Status computed = bound_.layer->plain
                                ? core_.engine->compute(bound_.recipe, bound_.layer->tensors, rows, pairs, out)
                                : core_.engine->compute_fast(bound_.recipe, bound_.layer->copies, rows, pairs, out);
    // Its pairs come token by token; how many experts they share is not worth counting.
    core_.stats.count_compute(bound_.layer->plain ? wire::Numerics::kExact : wire::Numerics::kFast, pairs.size(), pairs.size(),
                              monotonic_now() - start);
    return computed;
  }

  ServerCore& core_;
  net::Stream& stream_;
  const Wake& wake_;
  const BoundRecipe bound_;
  net::FrameWriter writer_;
  wire::RawParser parser_;
  Bytes buffer_;
  ByteSpan unread_;  // of the buffer: not yet parsed
  bool ended_ = false;
  Scratch<float> out_;
};

}  // namespace

Result<BoundRecipe> choose_raw_layer(const SliceStore& store, std::optional<std::uint32_t> layer) {
  HeldLayerPtr chosen;
  for (const HeldLayerPtr& held : store.layers()) {
    if (layer && held->layer != *layer) continue;
    if (chosen)
      return fix_input(layer ? std::format("Several slices hold layer {}, and the older framing cannot choose.", *layer)
                             : "The older framing has no layer: choose one with --layer.");
    chosen = held;
  }
  if (!chosen)
    return fix_input(layer ? std::format("No slice holds layer {}.", *layer) : "No layer is held.");
  const auto recipe = plain_swiglu_recipe(*chosen);
  if (!recipe)
    return fix_input(std::format("The older framing carries no recipe and stands for SwiGLU without biases, which "
                                 "layer {} is not.", chosen->layer));
  return BoundRecipe{*recipe, std::move(chosen)};
}

Status serve_raw(ServerCore& core, net::Stream& stream, const Wake& wake, ByteSpan first) {
  if (!core.options.raw_framing)
    return fix_input("it does not speak Kvasir's protocol, and the older framing is not served on this port.");
  KVASIR_ASSIGN(BoundRecipe bound, choose_raw_layer(core.store.files(), core.options.raw_layer));
  RawSession session(core, stream, wake, std::move(bound), first);
  while (true) {
    KVASIR_ASSIGN(const bool open, session.serve_one());
    if (!open) return {};
  }
}

}  // namespace kvasir::worker
