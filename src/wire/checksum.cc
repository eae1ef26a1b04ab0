#include "wire/checksum_kernels.h"
#include "wire/checksum_loops.h"
#include "wire/codec.h"

namespace kvasir::wire {
namespace {

const ChecksumKernels*& kernels() {
  static const ChecksumKernels* used = &best_checksum_kernels();
  return used;
}

}  // namespace

constexpr ChecksumKernels kBaselineChecksumKernels = {checksum_whole, checksum_parts};

#if defined(__x86_64__)
extern const ChecksumKernels kAvx2ChecksumKernels;

const ChecksumKernels& best_checksum_kernels() {
  return __builtin_cpu_supports("avx2") ? kAvx2ChecksumKernels : kBaselineChecksumKernels;
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
