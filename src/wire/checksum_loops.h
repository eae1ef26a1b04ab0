// XXH3 over one span and over two behind each other. Each file that includes this builds them anew, for the
// instructions it is compiled for; nameless, so that no build's code is taken for another's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "wire/xxhash_inline.h"

namespace kvasir::wire {
namespace {

inline std::uint64_t checksum_whole(const void* bytes, std::size_t n) { return XXH3_64bits(bytes, n); }

inline std::uint64_t checksum_parts(const void* first, std::size_t n_first, const void* second, std::size_t n_second) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, first, n_first);
  XXH3_64bits_update(&state, second, n_second);
  return XXH3_64bits_digest(&state);
}

}  // namespace
}  // namespace kvasir::wire
