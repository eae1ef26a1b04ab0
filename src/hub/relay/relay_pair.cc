#include "hub/relay/relay_pair.h"

#include "hub/relay/relay_splice.h"

namespace kvasir::hub {

asio::awaitable<PumpEnd> pump(End& from, End& to, std::atomic<std::uint64_t>& bytes,
                              std::atomic<std::int64_t>& moved_ns, End::Got got) {
  const auto count = [&](std::uint64_t n) {
    bytes.fetch_add(n, std::memory_order_relaxed);
    moved_ns.store(End::now_ns(), std::memory_order_relaxed);
  };
  bool can_splice = from.bare_fd() >= 0 && to.bare_fd() >= 0;
  std::unique_ptr<SplicePipe> pipe;
  while (true) {
    if (!got.payload.empty() || (!got.error && got.message_done)) {
      count(got.payload.size());
      if (co_await to.write_piece(got.payload, got.message_done, got.binary)) co_return PumpEnd{.from_failed = false};
    }
    if (got.error) co_return PumpEnd{.in_order = got.closed_in_order};
    if (can_splice && from.bare_left() >= kSpliceBytesMin) {
      if (pipe == nullptr) pipe = SplicePipe::make_or_null();
      can_splice = pipe != nullptr;
    }
    if (can_splice && pipe != nullptr && from.bare_left() > 0) {
      const SplicePipe::Moved moved = co_await pipe->move_some(from, to);
      count(moved.bytes);
      if (moved.to_failed) co_return PumpEnd{.from_failed = false};
      got = moved.got;
      got.message_done = false;  // it went with the frame
      can_splice = !moved.refused;
      continue;
    }
    got = co_await from.read_piece(can_splice);
  }
}

}  // namespace kvasir::hub
