// Where the matrices of a layer may lie for a device: in its plain buffers, which class exact
// needs, or in an extra buffer type, whose kernels want the weights rearranged (CPU_REPACK,
// AMX). An extra type takes some matrices and not others, so each is asked about.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ffn/engine.h"
#include "ggml-cpp.h"

namespace kvasir::ffn {

// The device's buffer types beside its default one; empty for most devices.
std::vector<ggml_backend_buffer_type_t> extra_buffer_types(ggml_backend_dev_t device);

// How a stack of matrices lies in a buffer type.
struct Place {
  std::size_t expert_bytes = 0;  // distance from one expert's matrix to the next
  bool stacked = false;          // the device multiplies the stack at once there (MUL_MAT_ID)
  bool single = false;           // …and one expert's matrix alone (MUL_MAT)
};
// nullopt: the device does not multiply such matrices there at all.
std::optional<Place> find_place(ggml_backend_dev_t device, ggml_backend_buffer_type_t buffer_type, ggml_type type,
                                std::int64_t n_in, std::int64_t n_out, std::int64_t n_local);
// Of a stack that has its memory.
Place place_of(ggml_backend_dev_t device, const ggml_tensor* stack);

// Makes `single` [n_in, n_out] (or [n_out], for a bias) stand for one expert of `stack`, which
// has its memory. May be called again for another expert of a stack in the same buffer type.
void point_at_expert(ggml_tensor* single, const ggml_tensor* stack, std::size_t expert_bytes, std::uint32_t expert);

// One copy of a layer's matrices in an extra buffer type.
class PackedMatrices {
 public:
  // Plans only: which of the matrices of `shape` (data or not) the buffer type takes.
  static Result<PackedMatrices> plan(ggml_backend_dev_t device, ggml_backend_buffer_type_t buffer_type,
                                     const ExpertTensors& shape);
  bool empty() const { return stacks_.empty(); }
  bool takes(const ggml_tensor* of_shape) const;
  std::uint64_t bytes() const { return bytes_; }  // of memory, once allocated
  Status allocate();
  // Writes one expert's matrix, rearranging it. `slab` as in a file.
  void set(const ggml_tensor* of_shape, std::uint32_t expert, const void* slab);
  // `shape` with the matrices taken replaced by those here.
  ExpertTensors over(const ExpertTensors& shape) const;

 private:
  struct Stack {
    const ggml_tensor* of_shape;
    ggml_tensor* tensor;
    ggml_tensor* single;
    std::size_t expert_bytes;
    std::size_t offset;
  };
  ggml_backend_buffer_type_t buffer_type_ = nullptr;
  ggml_context_ptr context_;
  std::vector<Stack> stacks_;
  std::uint64_t bytes_ = 0;
  ggml_backend_buffer_ptr buffer_;
};

// Weights are read at random in pieces of some MiB: huge pages read up to 1.5 times faster.
// Asked for before the memory is touched; a refusal costs nothing but speed. Host memory only.
void prefer_huge_pages(ggml_backend_buffer_t buffer);

}  // namespace kvasir::ffn
