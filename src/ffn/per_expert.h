// A graph of products with single experts (MUL_MAT), made once and then pointed at other
// experts, row counts and layers: a request builds nothing and allocates nothing.
//
// Rows are gathered per expert into blocks; a call computes some blocks, then their output
// rows are read. One thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "ffn/engine.h"
#include "ffn/graph.h"
#include "ffn/placement.h"
#include "ggml-cpp.h"

namespace kvasir::ffn {

inline constexpr std::uint32_t kBlocksMax = 64;  // experts in a call

class PerExpertGraph {
 public:
  // For any layer of this recipe whose tensors have the types and places of `like`.
  static Result<std::unique_ptr<PerExpertGraph>> build(const wire::Recipe& recipe, const ExpertTensors& like,
                                                       ggml_backend_dev_t device);
  bool fits(const wire::Recipe& recipe, const ExpertTensors& tensors) const;
  std::uint64_t bytes() const;  // of device memory
  std::uint32_t block_rows_max() const { return block_rows_max_; }

  void begin(const ExpertTensors& tensors);
  bool has_room(std::uint32_t n_rows) const;
  // A block of 1 … block_rows_max() rows; gives the place of its first row among the call's.
  std::uint32_t add(std::uint32_t expert, std::uint32_t n_rows);
  // The rows of the call, [rows][n_embd], to be written before run(); null on devices whose
  // memory the host cannot address: then upload() does it.
  float* x() const;
  void upload(const float* rows, std::uint32_t n_rows);
  ggml_status run(ggml_backend_t backend);
  const float* out() const;  // as x()
  void download(float* rows, std::uint32_t n_rows) const;

 private:
  struct Weight {  // a leaf that stands for one expert's part of a stack
    MatrixRole role;
    char part;  // m, s, b
    ggml_tensor* tensor;
  };
  struct Activation {
    ggml_tensor* tensor;
    std::size_t offset;  // in the arena, bytes
    bool whole_call;     // x and out: one region for all rows of the call
  };
  struct Block {
    std::vector<Weight> weights;
    std::vector<Activation> activations;
    std::vector<ggml_tensor*> nodes;
  };
  ggml_tensor* path(Block& block, MatrixRole role, ggml_tensor* x);
  void place(Block& block, std::uint32_t first_row, std::uint32_t n_rows);

  wire::Recipe recipe_;
  ExpertTensors like_;  // while it is built
  struct Kind {
    ggml_type type;
    ggml_backend_buffer_type_t place;
    friend bool operator==(const Kind&, const Kind&) = default;
  };
  static std::vector<Kind> kinds_of(const wire::Recipe& recipe, const ExpertTensors& tensors);
  std::vector<Kind> kinds_;
  std::array<std::size_t, 4> expert_bytes_{};  // by role
  ggml_context_ptr context_;
  ggml_cgraph* graph_ = nullptr;
  ggml_backend_buffer_ptr arena_;
  ggml_tensor *all_x_ = nullptr, *all_out_ = nullptr;
  std::size_t arena_bytes_ = 0;
  std::uint32_t block_rows_max_ = 0, call_rows_max_ = 0;
  std::vector<Block> blocks_;
  const ExpertTensors* tensors_ = nullptr;  // between begin() and run()
  std::uint32_t n_blocks_ = 0, n_rows_ = 0;
};

}  // namespace kvasir::ffn
