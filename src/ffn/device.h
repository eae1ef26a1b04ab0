// ggml's devices by name, and the few calls that ggml offers only through its registry.
#pragma once

#include <string>
#include <string_view>

#include "base/error.h"
#include "ggml-cpp.h"

namespace kvasir::ffn {

inline constexpr int kThreadsMax = 512;  // GGML_MAX_N_THREADS

// Loads ggml's backend libraries unless the process has some already (inside llama.cpp it
// does). Any number of calls from any thread. ggml reads GGML_BACKEND_PATH here too: a
// process that must not load that library unsets it first.
void load_backends();

// For a process that computes on the CPU only, before it loads the backends: GPU drivers stay
// out of it. (llvmpipe alone, which Vulkan loads where there is no GPU, keeps 46 MB resident.)
// A setting of the user's own stands. Changes the environment: no other thread may run yet.
void leave_gpu_drivers_out();

// The device, or a sentence that lists those there are.
Result<ggml_backend_dev_t> find_device(std::string_view name);

bool is_cpu(ggml_backend_dev_t device);

// A stream on the device. `n_threads` matters to CPU devices only.
Result<ggml_backend_ptr> open_backend(ggml_backend_dev_t device, int n_threads);
// Threads of the next computations; nothing on devices without threads. Clamped to [1, kThreadsMax].
void set_threads(ggml_backend_t backend, int n_threads);

// What sets this build of the device's backend apart: for the CPU the instruction sets of
// the variant that ggml picked ("AVX2=1 FMA=1 …"), else the device's name and description.
std::string describe_build(ggml_backend_dev_t device);

}  // namespace kvasir::ffn
