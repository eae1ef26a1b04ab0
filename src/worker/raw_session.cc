#include "worker/raw_session.h"

#include <algorithm>
#include <cstring>
#include <format>

namespace kvasir::worker {
namespace {

constexpr std::size_t kHeadBytes = 8;
constexpr std::size_t kReadAtOnceBytes = 1u << 20;  // memory follows the bytes that came

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
  RawSession(ServerCore& core, net::Stream& stream, const Wake& wake, BoundRecipe bound)
      : core_(core), stream_(stream), wake_(wake), bound_(std::move(bound)) {}

  // True: one request answered. False: the peer has closed.
  Result<bool> serve_one(ByteSpan first) {
    std::array<std::byte, kHeadBytes> head;
    std::ranges::copy(first, head.begin());
    KVASIR_ASSIGN(const bool open, read_head(std::span(head).subspan(first.size())));
    if (!open) return false;
    const auto n_used = load_le<std::int32_t>(head.data()), n_tokens = load_le<std::int32_t>(head.data() + 4);
    if (n_used < 1 || n_tokens < 1 || n_used > static_cast<std::int32_t>(wire::kExpertsMax) ||
        n_tokens > static_cast<std::int32_t>(wire::kExecRowsMax))
      return fix_input(std::format("it sent n_used {} and n_tokens {}.", n_used, n_tokens));
    const std::uint64_t n_embd = bound_.recipe.n_embd;
    const std::uint64_t n_rows = static_cast<std::uint64_t>(n_tokens);
    const std::uint64_t n_pairs = static_cast<std::uint64_t>(n_used) * n_rows;  // <= 2^30
    const std::uint64_t rows_bytes = n_rows * n_embd * sizeof(float), answer_bytes = n_pairs * n_embd * sizeof(float);
    const std::uint64_t body_bytes = rows_bytes + n_pairs * sizeof(std::int32_t);
    if (n_pairs > wire::kExecPairsMax || body_bytes > wire::kFramePayloadBytesMax ||
        answer_bytes > wire::kAnswerBytesMax)
      return fix_input(std::format("{} tokens with {} experts each are too many for one request.", n_tokens, n_used));
    const MemoryBudget::Share share = core_.budget.take(body_bytes + answer_bytes);
    if (!share) return retry_later("there is no memory for its request now.");

    KVASIR_TRY(read_body(body_bytes));
    core_.stats.bytes_received += kHeadBytes + body_bytes;
    std::vector<ffn::LocalPair> pairs(n_pairs);
    for (std::size_t i = 0; i < n_pairs; ++i) {
      const auto local = load_le<std::int32_t>(body_.data() + rows_bytes + i * sizeof(std::int32_t));
      if (local < 0 || static_cast<std::uint32_t>(local) >= bound_.layer->tensors.n_local)
        return fix_input(std::format("it asked for local expert {} of {}.", local, bound_.layer->tensors.n_local));
      pairs[i] = {static_cast<std::uint32_t>(i / static_cast<std::size_t>(n_used)), static_cast<std::uint32_t>(local)};
    }
    float* out = out_.room_for(n_pairs * n_embd);
    const auto* rows = reinterpret_cast<const float*>(body_.data());  // operator new aligns it
    KVASIR_TRY(compute({rows, n_embd, static_cast<std::uint32_t>(n_rows)}, pairs, out));
    KVASIR_TRY(send_whole(stream_, writer_, core_.options.timeouts,
                          std::as_bytes(std::span(out, n_pairs * n_embd))));
    core_.stats.bytes_sent += answer_bytes;
    ++core_.stats.requests;
    out_.trim(kScratchBytesKept);
    if (body_.capacity() > kScratchBytesKept) Bytes().swap(body_);
    return true;
  }

 private:
  // An idle peer may wait as long as it likes; one that has begun may not.
  Result<bool> read_head(std::span<std::byte> rest) {
    std::size_t filled = kHeadBytes - rest.size();
    while (filled == 0) {
      if (core_.draining) return false;
      KVASIR_ASSIGN(const net::IoResult got, stream_.read_some(rest));
      if (got.state == net::IoState::kEnd) return false;
      filled += got.bytes;
      rest = rest.subspan(got.bytes);
      if (got.state != net::IoState::kWouldBlock) continue;
      wait_for(&stream_, /*reading=*/true, &wake_, monotonic_now() + std::chrono::hours(1));
    }
    return read_whole(stream_, rest, monotonic_now() + core_.options.timeouts.stall);
  }

  Status read_body(std::uint64_t bytes) {
    body_.clear();
    while (body_.size() < bytes) {
      const std::size_t at = body_.size();
      const std::size_t n = std::min<std::uint64_t>(bytes - at, kReadAtOnceBytes);
      body_.resize(at + n);
      KVASIR_ASSIGN(const bool open, read_whole(stream_, std::span(body_).subspan(at),
                                                monotonic_now() + time_allowed(core_.options.timeouts, n)));
      if (!open) return retry_elsewhere("it closed the connection in the middle of a request.");
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
    const Status computed = core_.engine->compute(bound_.recipe, bound_.layer->tensors, rows, pairs, out);
    core_.stats.count_compute(pairs.size(), monotonic_now() - start);
    return computed;
  }

  ServerCore& core_;
  net::Stream& stream_;
  const Wake& wake_;
  const BoundRecipe bound_;
  net::FrameWriter writer_;
  Bytes body_;
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
  KVASIR_ASSIGN(BoundRecipe bound, choose_raw_layer(core.store, core.options.raw_layer));
  RawSession session(core, stream, wake, std::move(bound));
  while (true) {
    KVASIR_ASSIGN(const bool open, session.serve_one(first));
    if (!open) return {};
    first = {};
  }
}

}  // namespace kvasir::worker
