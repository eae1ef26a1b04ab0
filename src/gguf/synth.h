// Synthetic models: any geometry, random weights, a working byte-level tokenizer. They load
// and run in an unmodified llama.cpp; what they say is noise, but every bit of every weight
// counts, which is what tests and benchmarks need.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"
#include "ggml.h"
#include "gguf/copy_runs.h"

namespace kvasir::gguf {

struct SynthOptions {
  std::string architecture = "qwen3moe";  // or qwen2moe, which has a shared expert
  std::uint32_t n_layer = 2;
  std::uint32_t n_expert = 8;
  std::uint32_t n_expert_used = 2;
  std::uint32_t n_embd = 256;
  std::uint32_t n_ff = 256;         // of one expert
  std::uint32_t n_ff_shared = 0;    // of the shared expert; 0 with qwen2moe: n_ff
  std::uint32_t n_vocab = 0;        // 0: as many as the tokenizer needs
  std::uint32_t n_context = 4096;
  ggml_type gate = GGML_TYPE_Q4_K;
  ggml_type up = GGML_TYPE_Q4_K;
  ggml_type down = GGML_TYPE_Q6_K;
  ggml_type dense = GGML_TYPE_Q8_0;  // attention, shared expert, embeddings; the router is F32
  std::uint64_t seed = 1;
  bool sparse = false;  // routed experts are left as holes: all zero, and no disk space
};

// "gate=Q4_K,up=Q4_K,down=Q6_K,dense=Q8_0"; "experts=T" sets the first three.
Status parse_synth_types(std::string_view text, SynthOptions& options);

Status write_synthetic(const SynthOptions& options, const std::string& path, const Progress& progress = {});

}  // namespace kvasir::gguf
