// Built for AVX2: of headers only those whose functions stay in this file, or a processor without it could be
// given code for it elsewhere.
#include <cstddef>
#include <cstdint>

#include "wire/xxhash_inline.h"

namespace kvasir::wire {

std::uint64_t checksum_avx2(const void* bytes, std::size_t n) { return XXH3_64bits(bytes, n); }

std::uint64_t checksum_avx2(const void* first, std::size_t n_first, const void* second, std::size_t n_second) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, first, n_first);
  XXH3_64bits_update(&state, second, n_second);
  return XXH3_64bits_digest(&state);
}

}  // namespace kvasir::wire
