#include "verify/expert_loader.h"

#include <algorithm>
#include <format>
#include <vector>

#include "ffn/device.h"

namespace kvasir::verify {
namespace {

using gguf::ExpertPart;
using gguf::ExpertRole;

ggml_tensor** slot_of(ffn::ExpertTensors& t, ExpertRole role, ExpertPart part) {
  ggml_tensor** const slots[4][3] = {{&t.gate, &t.gate_bias, &t.gate_scale},
                                     {&t.up, &t.up_bias, &t.up_scale},
                                     {&t.gate_up, &t.gate_up_bias, &t.gate_up_scale},
                                     {&t.down, &t.down_bias, &t.down_scale}};
  static_assert(int(ExpertRole::kDown) == 3 && int(ExpertPart::kScale) == 2);
  return part == ExpertPart::kInputScale ? nullptr : slots[static_cast<int>(role)][static_cast<int>(part)];
}

}  // namespace

Result<ggml_backend_buffer_type_t> cpu_buffer_type() {
  ffn::load_backends();
  KVASIR_ASSIGN(ggml_backend_dev_t cpu, ffn::find_device("CPU"));
  return ggml_backend_dev_buffer_type(cpu);
}

std::size_t experts_per_load(const gguf::LayerExperts& layer) {
  return static_cast<std::size_t>(std::max<std::uint64_t>(1, kLoadBytes / std::max<std::uint64_t>(1, layer.bytes_per_expert())));
}

Result<LoadedExperts> load_experts(const gguf::MoeModel& model, const gguf::LayerExperts& layer,
                                   std::span<const std::uint32_t> experts, ggml_backend_buffer_type_t buffer_type) {
  LoadedExperts loaded;
  loaded.context.reset(ggml_init({ggml_tensor_overhead() * (layer.tensors.size() + 1), nullptr, /*no_alloc=*/true}));
  ggml_context* ctx = loaded.context.get();
  if (!ctx) return retry_later("there is no memory left for a list of tensors.");
  const auto n = static_cast<std::int64_t>(experts.size());
  std::vector<std::pair<const gguf::ExpertTensor*, ggml_tensor*>> made;
  for (const gguf::ExpertTensor& from : layer.tensors) {
    ggml_tensor** slot = slot_of(loaded.tensors, from.id.role, from.id.part);
    if (!slot || !from.per_expert) continue;  // no recipe names it
    const auto n0 = static_cast<std::int64_t>(from.ne[0]), n1 = static_cast<std::int64_t>(from.ne[1]);
    switch (gguf::stacked_dimension(from.id.part)) {
      case 0: *slot = ggml_new_tensor_1d(ctx, from.type, n); break;
      case 1: *slot = ggml_new_tensor_2d(ctx, from.type, n0, n); break;
      default: *slot = ggml_new_tensor_3d(ctx, from.type, n0, n1, n); break;
    }
    if (ggml_nbytes(*slot) != from.bytes_per_expert * static_cast<std::uint64_t>(n))
      return fix_input(std::format("{}: {} does not have the size its shape says.", model.file_name(), from.name));
    ggml_set_name(*slot, from.name.c_str());
    made.emplace_back(&from, *slot);
  }
  loaded.tensors.n_local = static_cast<std::uint32_t>(experts.size());
  loaded.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx, buffer_type));
  if (!loaded.buffer)
    return retry_later(std::format("there is no room on {} for {} experts of layer {}.", ggml_backend_buft_name(buffer_type),
                                   experts.size(), layer.layer));
  ggml_backend_buffer_set_usage(loaded.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  Bytes slab;
  for (const auto& [from, tensor] : made) {
    slab.resize(from->bytes_per_expert);
    for (std::size_t i = 0; i < experts.size(); ++i) {
      const auto rank = layer.held.rank(experts[i]);
      if (!rank) return fix_input(std::format("{} holds no expert {} of layer {}.", model.file_name(), experts[i], layer.layer));
      KVASIR_TRY(model.read_slab(*from, *rank, slab));
      ggml_backend_tensor_set(tensor, slab.data(), i * slab.size(), slab.size());
    }
  }
  return loaded;
}

}  // namespace kvasir::verify
