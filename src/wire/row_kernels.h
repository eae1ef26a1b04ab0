// The loops behind encode_row and decode_row, built for the baseline of the architecture and,
// on x86-64, for AVX2 with F16C. All builds give the same bits (NaN payloads aside).
#pragma once

#include <cstddef>
#include <span>

namespace kvasir::wire {

// `out` and `in` hold row_bytes(type, values) bytes; for q8 the number of values is a multiple of 32.
struct RowKernels {
  using Encode = void (*)(std::span<const float> values, std::byte* out);
  using Decode = void (*)(const std::byte* in, std::span<float> out);
  Encode f16_encode, bf16_encode, q8_encode;
  Decode f16_decode, bf16_decode, q8_decode;
};

extern const RowKernels kBaselineRowKernels;
const RowKernels& best_row_kernels();  // of what this processor can run

}  // namespace kvasir::wire
