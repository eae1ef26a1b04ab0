// Any bytes as a GGUF file: reading it, seeing experts in it, laying out a slice of all of
// them and reading that through must end in an error or a result, never in a crash.

#include <cstdint>
#include <span>

#include "cut_slice.h"
#include "gguf/moe_model.h"
#include "gguf/placeholder.h"
#include "gguf/verify.h"

namespace {

using namespace kvasir;
using namespace kvasir::gguf;

// Values read on demand, which opening the file has only walked over.
void read_values(const GgufFile& file) {
  constexpr std::uint64_t kCountMax = 1000;
  for (const KeyValue& kv : file.key_values()) {
    (void)file.get_uint(kv.key);
    (void)file.get_string(kv.key);
    (void)file.get_u32_array(kv.key, kCountMax);
    (void)file.get_string_array(kv.key, kCountMax);
    (void)file.get_raw_value(kv);
  }
}

void use_experts(const MoeModel& model) {
  for (const LayerExperts& layer : model.layers()) {
    (void)model.layer_id(layer);
    for (const ExpertTensor& tensor : layer.tensors) (void)model.slab_hashes(tensor);
  }
  // What was cut is what it was cut from.
  fuzz::cut_slice(model, SlicePlan::from_ranges(model, ":", ":"),
                  [&](const MoeModel& slice) { fuzz::must("comparing the slice", verify(slice, model)); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  (void)decode_placeholder(bytes);
  auto files = ModelFiles::from_source(make_memory_source("input", bytes));
  if (!files) return 0;
  read_values(files->metadata());
  const auto model = MoeModel::from_files(*std::move(files));
  if (model) use_experts(*model);
  return 0;
}
