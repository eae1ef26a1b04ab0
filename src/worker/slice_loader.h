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

  // Makes the tensors (without data) and gives the device memory they need, bytes. May be
  // called again with another packing; one that rearranges asks the device.
  Result<std::uint64_t> lay_out(ggml_backend_buffer_type_t buffer_type, Packing packing = Packing::kNone,
                                ggml_backend_dev_t device = nullptr);
  std::uint64_t packed_bytes() const { return held_->packed ? held_->packed->bytes() : 0; }
  // Allocates, reads and, if asked, verifies. Call once, after lay_out.
  Result<HeldLayerPtr> load(ggml_backend_buffer_type_t buffer_type, bool verify);

 private:
  struct Source {
    const gguf::MoeModel* model;
    const gguf::LayerExperts* layer;
  };
  struct Target {
    const gguf::ExpertTensor* shape;  // of the first source
    ggml_tensor* shape_tensor;  // what `packed` knows it by
    ggml_tensor* tensor;        // null: lies in the packed copy only
    bool expanded = false;      // F32 instead of the file's type
  };
  Status fill(const Target& target, bool verify) const;

  wire::LayerId id_;
  std::vector<Source> sources_;
  ExpertSet experts_;
  ggml_context_ptr shapes_;  // every tensor, without data
  std::vector<Target> targets_;
  std::shared_ptr<HeldLayer> held_;
};

}  // namespace kvasir::worker
