// The tokenizer of synthetic models: GPT-2's byte-level BPE with a handful of merges, so that
// any text can be read and any output printed.
#pragma once

#include <cstdint>

#include "gguf/header_builder.h"

namespace kvasir::gguf {

// Tokens that have a meaning: bytes, merges, end of text.
std::uint32_t synth_token_count();

// Adds tokenizer.ggml.*; n_vocab >= synth_token_count(), the rest are unused tokens.
void add_synth_tokenizer(std::uint32_t n_vocab, HeaderBuilder& header);

}  // namespace kvasir::gguf
