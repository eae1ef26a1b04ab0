// The plugin's buffer type: plain host memory that the CPU backend may read in place.
// Expert weights land here, either as a window into the mapped model file (KVASIR_REPLICA=mmap)
// or in anonymous memory with huge pages (ram); so do the inner values of our splits.
#pragma once

#include <cstddef>

#include "plugin/ggml_abi.h"

namespace kvasir::plugin {

// Called when a buffer of ours goes away, with its address range: whatever was derived from
// weights inside it is stale. Any thread.
using BufferFreed = void (*)(const void* begin, std::size_t bytes);

// Fills in the static buffer type. Once, before the device is handed out.
ggml_backend_buffer_type_t init_buffer_type(ggml_backend_dev_t device, BufferFreed on_freed);
bool is_our_buffer_type(ggml_backend_buffer_type_t type);
bool is_our_buffer(ggml_backend_buffer* buffer);
// Not owned: the caller keeps the memory (llama.cpp's file mapping).
ggml_backend_buffer_t buffer_from_host_memory(void* data, std::size_t bytes);

}  // namespace kvasir::plugin
