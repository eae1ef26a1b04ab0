#include "wire/checksum_kernels.h"
#include "wire/codec.h"
#include "wire/xxhash_inline.h"

namespace kvasir::wire {
namespace {

std::uint64_t baseline(const void* bytes, std::size_t n) { return XXH3_64bits(bytes, n); }

std::uint64_t baseline_parts(const void* first, std::size_t n_first, const void* second, std::size_t n_second) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, first, n_first);
  XXH3_64bits_update(&state, second, n_second);
  return XXH3_64bits_digest(&state);
}

const ChecksumKernels*& kernels() {
  static const ChecksumKernels* used = &best_checksum_kernels();
  return used;
}

}  // namespace

constexpr ChecksumKernels kBaselineChecksumKernels = {baseline, baseline_parts};

#if defined(__x86_64__)
std::uint64_t checksum_avx2(const void* bytes, std::size_t n);
std::uint64_t checksum_avx2(const void* first, std::size_t n_first, const void* second, std::size_t n_second);

const ChecksumKernels& best_checksum_kernels() {
  static const ChecksumKernels best =
      __builtin_cpu_supports("avx2") ? ChecksumKernels{checksum_avx2, checksum_avx2} : kBaselineChecksumKernels;
  return best;
}
#else
const ChecksumKernels& best_checksum_kernels() { return kBaselineChecksumKernels; }
#endif

void use_checksum_kernels(const ChecksumKernels& chosen) { kernels() = &chosen; }

std::uint32_t payload_checksum(ByteSpan payload) {
  return static_cast<std::uint32_t>(kernels()->whole(payload.data(), payload.size()));
}

std::uint32_t payload_checksum(ByteSpan first, ByteSpan second) {
  return static_cast<std::uint32_t>(kernels()->parts(first.data(), first.size(), second.data(), second.size()));
}

}  // namespace kvasir::wire
