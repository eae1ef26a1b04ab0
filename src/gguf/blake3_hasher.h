// BLAKE3-256 with C++ types.
#pragma once

#include <array>
#include <cstddef>

#include "base/bytes.h"
#include "blake3.h"

namespace kvasir::gguf {

using Hash = std::array<std::byte, BLAKE3_OUT_LEN>;

class Blake3 {
 public:
  Blake3() { blake3_hasher_init(&state_); }
  void update(ByteSpan bytes) { blake3_hasher_update(&state_, bytes.data(), bytes.size()); }
  Hash finish() {
    Hash out;
    blake3_hasher_finalize(&state_, reinterpret_cast<std::uint8_t*>(out.data()), out.size());
    blake3_hasher_reset(&state_);
    return out;
  }

 private:
  blake3_hasher state_;
};

}  // namespace kvasir::gguf
