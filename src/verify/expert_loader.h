// Some experts of one layer, read from a model or slice into memory of a device.
#pragma once

#include <cstdint>
#include <span>

#include "ffn/engine.h"
#include "ggml-cpp.h"
#include "gguf/moe_model.h"

namespace kvasir::verify {

struct LoadedExperts {
  ggml_context_ptr context;
  ggml_backend_buffer_ptr buffer;
  ffn::ExpertTensors tensors;  // local id = index in the ids asked for
};

// `experts` are the model's ids and are held by the file, or the error says which is not.
Result<LoadedExperts> load_experts(const gguf::MoeModel& model, const gguf::LayerExperts& layer,
                                   std::span<const std::uint32_t> experts, ggml_backend_buffer_type_t buffer_type);

// Memory of the default CPU buffer, which exact numerics and the oracle read.
Result<ggml_backend_buffer_type_t> cpu_buffer_type();

// How many experts of the layer to hold at once: at least one, else what fits kLoadBytes.
inline constexpr std::uint64_t kLoadBytes = 256u << 20;
std::size_t experts_per_load(const gguf::LayerExperts& layer);

}  // namespace kvasir::verify
