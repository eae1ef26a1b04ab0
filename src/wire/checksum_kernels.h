// The loops behind payload_checksum, built for the baseline of the architecture and, on x86-64, for AVX2. All
// builds give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvasir::wire {

struct ChecksumKernels {
  std::uint64_t (*whole)(const void* bytes, std::size_t n);
  // Of both behind each other.
  std::uint64_t (*parts)(const void* first, std::size_t n_first, const void* second, std::size_t n_second);
};

extern const ChecksumKernels kBaselineChecksumKernels;
const ChecksumKernels& best_checksum_kernels();  // of what this processor can run
// For payload_checksum, instead of the best; before threads are started.
void use_checksum_kernels(const ChecksumKernels& kernels);

}  // namespace kvasir::wire
