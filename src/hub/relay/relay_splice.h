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

class SplicePipe {
 public:
  // Null where there are enough already, or the kernel gives none: then bytes are copied.
  static std::unique_ptr<SplicePipe> make_or_null();
  ~SplicePipe();
  SplicePipe(const SplicePipe&) = delete;
  SplicePipe& operator=(const SplicePipe&) = delete;

  struct Moved {
    End::Got got{};  // without payload
    std::uint64_t bytes = 0;
    bool to_failed = false;
    bool refused = false;  // these sockets cannot do it: nothing has moved
  };
  // A part of the frame under way at `from` as a frame to `to`; waits for the first bytes.
  asio::awaitable<Moved> move_some(End& from, End& to);

 private:
  SplicePipe(int read_end, int write_end) : read_end_(read_end), write_end_(write_end) {}
  const int read_end_, write_end_;
};

}  // namespace kvasir::hub
