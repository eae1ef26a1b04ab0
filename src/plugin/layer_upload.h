// Slices cut for workers from a layer's experts in memory.
#pragma once

#include <vector>

#include "base/error.h"
#include "dispatch/dispatcher.h"
#include "gguf/memory_slice.h"
#include "plugin/expert_graph.h"

namespace kvasir::plugin {

// Valid while the FFN's tensors are.
class LayerUpload {
 public:
  // Refuses tensors that lie elsewhere or in pieces.
  static Result<LayerUpload> make(const ExpertFfn& ffn, const wire::LayerId& weights_id);

  // Of the weights' id and all bytes of the side tensors: a model in memory is no file, and one
  // with the same weights but other biases must not meet its experts.
  const wire::LayerId& id() const { return layer_.id; }
  void set_id(const wire::LayerId& id) { layer_.id = id; }
  dispatch::SliceMaker slices() const;

 private:
  std::vector<gguf::MemoryTensor> tensors_;
  gguf::MemoryLayer layer_;  // its tensors: set by slices()
  gguf::MemorySliceCost cost_;
};

}  // namespace kvasir::plugin
