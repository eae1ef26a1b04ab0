// Payloads that pass through the relay by the kernel's hand: from one socket through a pipe into
// the other, without a copy into this process. For large frames between plain connections whose
// mask is zero; everything else goes through memory.
#pragma once

#include <memory>

#include "hub/relay/end.h"

namespace kvasir::hub {

// Below this, two system calls more cost what the copy does.
inline constexpr std::size_t kSpliceBytesMin = 32 << 10;
inline constexpr std::size_t kSplicePipeBytes = 256 << 10;
// Of the whole process: the kernel lets an ordinary user have 64 MiB of pipes.
inline constexpr int kSplicePipesMax = 128;

// What has passed in one direction of a pair.
class MovedBytes {
 public:
  MovedBytes(std::atomic<std::uint64_t>& bytes, std::atomic<std::int64_t>& last_ns)
      : bytes_(bytes), last_ns_(last_ns) {}
  void add(std::uint64_t n) {
    bytes_.fetch_add(n, std::memory_order_relaxed);
    last_ns_.store(End::now_ns(), std::memory_order_relaxed);
  }

 private:
  std::atomic<std::uint64_t>& bytes_;
  std::atomic<std::int64_t>& last_ns_;
};

class SplicePipe {
 public:
  // Null where there are enough already, or the kernel gives none: then bytes are copied.
  static std::unique_ptr<SplicePipe> make_or_null();
  ~SplicePipe();
  SplicePipe(const SplicePipe&) = delete;
  SplicePipe& operator=(const SplicePipe&) = delete;

  enum class Moved {
    kWhole,
    kFromFailed,  // and if a part had moved already, `to` has been aborted
    kToFailed,
    kCannot,  // these sockets cannot do it: nothing has moved
  };
  // What is left of the frame under way at `from`, as one frame to `to`, each part as soon as it is here.
  asio::awaitable<Moved> move_frame(End& from, End& to, MovedBytes& moved);

 private:
  SplicePipe(int read_end, int write_end) : read_end_(read_end), write_end_(write_end) {}
  const int read_end_, write_end_;
};

}  // namespace kvasir::hub
