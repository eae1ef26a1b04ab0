#include "hub/relay/relay_pair.h"

#include "hub/relay/relay_splice.h"

namespace kvasir::hub {
namespace {

constexpr int kTurnsAtOnce = 32;

}  // namespace

asio::awaitable<PumpEnd> pump(End& from, End& to, std::atomic<std::uint64_t>& bytes,
                              std::atomic<std::int64_t>& moved_ns, End::Got got) {
  MovedBytes moved(bytes, moved_ns);
  bool can_splice = from.bare_fd() >= 0 && to.bare_fd() >= 0;
  std::unique_ptr<SplicePipe> pipe;
  for (int turn = 1;; ++turn) {
    // Where bytes are always there and always taken, others on this thread want their turn, too.
    if (turn % kTurnsAtOnce == 0) co_await asio::post(asio::use_awaitable);
    if (!got.payload.empty() || (!got.error && got.message_done)) {
      moved.add(got.payload.size());
      if (co_await to.write_piece(got.payload, got.message_done, got.binary)) co_return PumpEnd{.from_failed = false};
    }
    if (got.error) co_return PumpEnd{.in_order = got.closed_in_order};
    if (can_splice && from.bare_left() >= kSpliceBytesMin) {
      if (pipe == nullptr) pipe = SplicePipe::make_or_null();
      const SplicePipe::Moved how =
          pipe == nullptr ? SplicePipe::Moved::kCannot : co_await pipe->move_frame(from, to, moved);
      if (how == SplicePipe::Moved::kToFailed) co_return PumpEnd{.from_failed = false};
      if (how == SplicePipe::Moved::kFromFailed) co_return PumpEnd{};
      can_splice = how == SplicePipe::Moved::kWhole;
    }
    got = co_await from.read_piece(can_splice);
  }
}

}  // namespace kvasir::hub
