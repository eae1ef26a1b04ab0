// Built for AVX2: of headers only those whose functions stay in this file, or a processor without it could be
// given code for it elsewhere.
#include "wire/checksum_kernels.h"
#include "wire/checksum_loops.h"

namespace kvasir::wire {

extern const ChecksumKernels kAvx2ChecksumKernels;
constexpr ChecksumKernels kAvx2ChecksumKernels = {checksum_whole, checksum_parts};

}  // namespace kvasir::wire
