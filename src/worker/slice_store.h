// The experts a worker holds: one HeldLayer per layer identity, in memory of the device.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/expert_set.h"
#include "ffn/engine.h"
#include "ffn/placement.h"
#include "ggml-cpp.h"
#include "wire/messages.h"

namespace kvasir::worker {

// Immutable once made, but for its time of use; shared by the connections that have bound it.
struct HeldLayer {
  wire::LayerId layer_id{};
  std::uint32_t layer = 0;
  wire::ExpertGroup group = wire::ExpertGroup::kExps;
  std::uint32_t n_expert = 0;  // of the model's layer
  std::uint32_t n_embd = 0;
  ExpertSet experts;
  std::vector<std::int32_t> local_of;  // by expert of the model: index in the tensors, or -1
  ffn::ExpertTensors tensors;                // the first copy: all shapes, and what exact requests use
  std::vector<ffn::ExpertTensors> copies;    // for class fast; copies[0] is `tensors`
  bool plain = true;                         // `tensors` lie as class exact needs them
  std::uint64_t bytes = 0;                   // of all copies
  std::string model_name;
  ggml_context_ptr context;
  ggml_backend_buffer_ptr buffer;
  std::optional<ffn::PackedMatrices> packed;
  mutable std::atomic<std::int64_t> used_ns = 0;  // by a request, on the monotonic clock
};
using HeldLayerPtr = std::shared_ptr<const HeldLayer>;

// Whether matrices are rearranged for the device's faster kernels (ffn/placement.h), or
// expanded. Class exact can use neither.
enum class Packing : std::uint8_t {
  kNone,
  kBeside,   // in a second copy, if `bytes_max` has room for it
  kInstead,  // in place of the plain ones: one copy, and no exact requests
  kExpanded,  // as F32 in place of the types of the file: then ggml rounds no activations to 8 bits
};

struct StoreOptions {
  std::string device = "CPU";
  std::uint64_t bytes_max = 0;  // of all experts; 0: no limit of its own
  bool verify = true;           // compare slab hashes where the file has them
  std::optional<std::uint32_t> only_layer;
  Packing packing = Packing::kNone;
};

class SliceStore {
 public:
  // Opens every file and adds up their sizes before it loads anything. Files may be slices
  // or whole models, of one model or several; the same layer in several files is joined.
  static Result<SliceStore> load(std::span<const std::string> files, const StoreOptions& options);

  const std::vector<HeldLayerPtr>& layers() const { return layers_; }
  std::uint64_t bytes() const { return bytes_; }  // of all copies
  std::uint64_t packed_bytes() const { return packed_bytes_; }  // of those, rearranged
  bool plain() const { return plain_; }  // exact requests can be served
  HeldLayerPtr find(const wire::LayerId& layer_id) const;  // null if not held
  wire::Holdings holdings() const;

 private:
  std::vector<HeldLayerPtr> layers_;  // by (layer, group, id)
  std::uint64_t bytes_ = 0, packed_bytes_ = 0;
  bool plain_ = true;
};

// The recipe that a peer of the older framing takes for granted: SwiGLU without biases.
// nullopt if the layer has another shape.
std::optional<wire::Recipe> plain_swiglu_recipe(const HeldLayer& layer);

}  // namespace kvasir::worker
