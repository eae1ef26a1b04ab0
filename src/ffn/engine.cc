#include "ffn/engine.h"

#include "ffn/device.h"
#include "ffn/lane_engine.h"

namespace kvasir::ffn {

Result<std::unique_ptr<Engine>> Engine::create(const EngineOptions& options) {
  KVASIR_ASSIGN(ggml_backend_dev_t device, find_device(options.device));
  if (is_cpu(device)) return LaneEngine::create(device, options.numerics, options.n_threads);
  KVASIR_ASSIGN(ggml_backend_ptr backend, open_backend(device, options.n_threads));
  return std::make_unique<GgmlEngine>(device, std::move(backend), options.numerics, options.n_threads);
}

}  // namespace kvasir::ffn
