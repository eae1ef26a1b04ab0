// The expert FFN as one would first write it with ggml: MUL_MAT_ID on the default buffer with
// top-k ids, one graph per number of tokens. Fair to ggml: graphs are kept, inputs set in place.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>

#include "ggml-cpp.h"
#include "gguf/moe_model.h"
#include "wire/recipe.h"

namespace kvasir::cli {

class NaiveFfn {
 public:
  // Loads one layer whose gate and up are split and which has no biases.
  static Result<std::unique_ptr<NaiveFfn>> load(const gguf::MoeModel& model, const gguf::LayerExperts& layer,
                                                std::uint32_t n_used, int n_threads);

  // `x` [n_tokens][n_embd], `ids` [n_tokens][n_used] local; `out` [n_tokens][n_used][n_embd].
  Status compute(std::span<const float> x, std::span<const std::int32_t> ids, float* out);

 private:
  struct Graph {
    ggml_context_ptr context;
    ggml_cgraph* graph = nullptr;
    ggml_tensor *x = nullptr, *ids = nullptr, *out = nullptr;
    ggml_gallocr_ptr memory;
  };
  Result<Graph*> graph_for(std::int64_t n_tokens);

  std::int64_t n_used_ = 0;
  ggml_backend_ptr backend_;
  ggml_context_ptr context_;
  ggml_backend_buffer_ptr buffer_;
  ggml_tensor *gate_ = nullptr, *up_ = nullptr, *down_ = nullptr;
  std::map<std::int64_t, Graph> graphs_;
};

}  // namespace kvasir::cli
