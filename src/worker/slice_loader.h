// One layer on its way from files into device memory: planned first, so that nothing is
// allocated before the sum is known, then filled slab by slab.
#pragma once

#include <vector>

#include "gguf/moe_model.h"
#include "worker/slice_store.h"

namespace kvasir::worker {

class LayerPlan {
 public:
  LayerPlan(const gguf::MoeModel& model, const gguf::LayerExperts& layer, const wire::LayerId& id);

  const wire::LayerId& id() const { return id_; }
  // Adds the experts that another file holds of the same layer.
  Status join(const gguf::MoeModel& model, const gguf::LayerExperts& layer);

  // Makes the tensors (without data) and gives the device memory they need, bytes.
  Result<std::uint64_t> lay_out(ggml_backend_buffer_type_t buffer_type);
  // Allocates, reads and, if asked, verifies. Call once, after lay_out.
  Result<HeldLayerPtr> load(ggml_backend_buffer_type_t buffer_type, bool verify);

 private:
  struct Source {
    const gguf::MoeModel* model;
    const gguf::LayerExperts* layer;
  };
  struct Target {
    const gguf::ExpertTensor* shape;  // of the first source
    ggml_tensor* tensor;
  };
  Status fill(const Target& target, bool verify) const;

  wire::LayerId id_;
  std::vector<Source> sources_;
  ExpertSet experts_;
  std::vector<Target> targets_;
  std::shared_ptr<HeldLayer> held_;
};

}  // namespace kvasir::worker
