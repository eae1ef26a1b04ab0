// The plugin's buffer type: plain host memory that the CPU backend may read in place.
// Expert weights land here, either as a window into the mapped model file (KVASIR_REPLICA=mmap)
// or in anonymous memory with huge pages (ram); so do the inner values of our splits. With
// `none` weights are addresses only: of what is written to one the first kPlaceholderBytes are
// kept, which say what belongs there (gguf/placeholder.h), and no page of the rest is touched.
#pragma once

#include <cstddef>

#include "plugin/ggml_abi.h"

namespace kvasir::plugin {

// Called when a buffer of ours goes away, with its address range: whatever was derived from
// weights inside it is stale. Any thread.
using BufferFreed = void (*)(const void* begin, std::size_t bytes);

// Fills in the static buffer type. Once, before the device is handed out. Without
// `keep_weights` the type says it is not host memory, so that llama.cpp hands weights over by
// set_tensor instead of reading them into place.
ggml_backend_buffer_type_t init_buffer_type(ggml_backend_dev_t device, BufferFreed on_freed, bool keep_weights);
// Plain host memory, where llama.cpp reads a file's bytes before it hands them over.
ggml_backend_buffer_type_t staging_buffer_type();
bool is_our_buffer_type(ggml_backend_buffer_type_t type);
bool is_our_buffer(ggml_backend_buffer* buffer);
// Not owned: the caller keeps the memory (llama.cpp's file mapping).
ggml_backend_buffer_t buffer_from_host_memory(void* data, std::size_t bytes);

}  // namespace kvasir::plugin
