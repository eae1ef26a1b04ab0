#include "hub/relay/relay_pair.h"

#include <algorithm>

namespace kvasir::hub {

asio::awaitable<PumpEnd> pump(End& from, End& to, std::atomic<std::uint64_t>& bytes, std::atomic<std::int64_t>& moved_ns,
                              End::Got got, std::span<const std::byte> first) {
  const auto buffer = std::make_unique_for_overwrite<std::byte[]>(kRelayChunkBytes);
  std::ranges::copy(first, buffer.get());
  std::size_t have = first.size();
  while (true) {
    // A message comes in pieces of what the socket had; those that are here leave together.
    while (!got.error && !got.message_done && have < kRelayChunkBytes && (have == 0 || from.more_is_here())) {
      got = co_await from.read_some(asio::buffer(buffer.get() + have, kRelayChunkBytes - have));
      have += got.bytes;
    }
    if (have > 0 || (!got.error && got.message_done)) {
      bytes.fetch_add(have, std::memory_order_relaxed);
      moved_ns.store(End::now_ns(), std::memory_order_relaxed);
      // The limits of messages are kept: an older client may take one for a whole answer.
      const auto failed = co_await to.write_some(asio::buffer(buffer.get(), have), got.message_done, got.binary);
      if (failed) co_return PumpEnd{.from_failed = false};
    }
    if (got.error) co_return PumpEnd{.in_order = got.closed_in_order};
    have = 0;
    got.message_done = false;
  }
}

}  // namespace kvasir::hub
