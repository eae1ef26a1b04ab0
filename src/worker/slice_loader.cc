#include "worker/slice_loader.h"

#include <algorithm>
#include <cstring>
#include <format>

#include "base/check.h"

namespace kvasir::worker {
namespace {

using gguf::ExpertPart;
using gguf::ExpertRole;

// Where the tensor goes; null for parts no recipe names.
ggml_tensor** slot_of(ffn::ExpertTensors& t, const gguf::ExpertTensorName& name) {
  const auto choose = [&](ggml_tensor*& weight, ggml_tensor*& bias, ggml_tensor*& scale) -> ggml_tensor** {
    switch (name.part) {
      case ExpertPart::kWeight: return &weight;
      case ExpertPart::kBias: return &bias;
      case ExpertPart::kScale: return &scale;
      case ExpertPart::kInputScale: return nullptr;
    }
    return nullptr;
  };
  switch (name.role) {
    case ExpertRole::kGate: return choose(t.gate, t.gate_bias, t.gate_scale);
    case ExpertRole::kUp: return choose(t.up, t.up_bias, t.up_scale);
    case ExpertRole::kGateUp: return choose(t.gate_up, t.gate_up_bias, t.gate_up_scale);
    case ExpertRole::kDown: return choose(t.down, t.down_bias, t.down_scale);
  }
  return nullptr;
}

// The extra buffer type that takes most of the layer's bytes; ggml lists the fastest first.
Result<std::optional<ffn::PackedMatrices>> plan_packed(ggml_backend_dev_t device, const ffn::ExpertTensors& shape) {
  std::optional<ffn::PackedMatrices> best;
  for (ggml_backend_buffer_type_t type : ffn::extra_buffer_types(device)) {
    KVASIR_ASSIGN(ffn::PackedMatrices packed, ffn::PackedMatrices::plan(device, type, shape));
    if (!packed.empty() && (!best || packed.bytes() > best->bytes())) best = std::move(packed);
  }
  return best;
}

bool is_matrix(const gguf::ExpertTensor& tensor) { return gguf::stacked_dimension(tensor.id.part) == 2; }

bool same_slab(const gguf::ExpertTensor& a, const gguf::ExpertTensor& b) {
  return a.type == b.type && a.per_expert == b.per_expert && a.bytes_per_expert == b.bytes_per_expert &&
         a.ne[0] == b.ne[0];
}

}  // namespace

LayerPlan::LayerPlan(const gguf::MoeModel& model, const gguf::LayerExperts& layer, const wire::LayerId& id)
    : id_(id), sources_{{&model, &layer}}, experts_(layer.held) {}

Status LayerPlan::join(const gguf::MoeModel& model, const gguf::LayerExperts& layer) {
  const Source& first = sources_.front();
  for (const gguf::ExpertTensor& tensor : first.layer->tensors) {
    const gguf::ExpertTensor* other = layer.find(tensor.id.role, tensor.id.part);
    if (!other || !same_slab(tensor, *other) || layer.n_expert != first.layer->n_expert)
      return fix_input(std::format("'{}' and '{}' disagree about {}: cut both slices from the same model.",
                                   first.model->file_name(), model.file_name(), tensor.name));
  }
  sources_.push_back({&model, &layer});
  for (const Range& range : layer.held.ranges()) experts_.add(range);
  return {};
}

Result<std::uint64_t> LayerPlan::lay_out(ggml_backend_buffer_type_t buffer_type, Packing packing,
                                         ggml_backend_dev_t device) {
  const gguf::LayerExperts& layer = *sources_.front().layer;
  targets_.clear();
  held_ = std::make_shared<HeldLayer>();
  const ggml_init_params room{ggml_tensor_overhead() * (layer.tensors.size() + 1), nullptr, /*no_alloc=*/true};
  shapes_.reset(ggml_init(room));
  held_->context.reset(ggml_init(room));
  ggml_context* ctx = shapes_.get();
  if (!ctx || !held_->context) return retry_later("There is no memory left for the list of tensors.");
  const std::int64_t n_local = experts_.size();
  ffn::ExpertTensors shape;
  shape.n_local = experts_.size();
  for (const gguf::ExpertTensor& tensor : layer.tensors) {
    ggml_tensor** slot = slot_of(shape, tensor.id);
    // A side tensor shared by all experts stands for no operation of a recipe.
    if (!slot || !tensor.per_expert) continue;
    const auto n0 = static_cast<std::int64_t>(tensor.ne[0]), n1 = static_cast<std::int64_t>(tensor.ne[1]);
    switch (gguf::stacked_dimension(tensor.id.part)) {
      case 0: *slot = ggml_new_tensor_1d(ctx, tensor.type, n_local); break;
      case 1: *slot = ggml_new_tensor_2d(ctx, tensor.type, n0, n_local); break;
      default: *slot = ggml_new_tensor_3d(ctx, tensor.type, n0, n1, n_local); break;
    }
    if (ggml_nbytes(*slot) != tensor.bytes_per_expert * static_cast<std::uint64_t>(n_local))
      return fix_input(std::format("{}: {} has slabs of {} bytes, which does not agree with its shape.",
                                   sources_.front().model->file_name(), tensor.name, tensor.bytes_per_expert));
    ggml_set_name(*slot, tensor.name.c_str());
    targets_.push_back({&tensor, *slot, nullptr});
  }
  if (packing == Packing::kBeside || packing == Packing::kInstead) {
    KVASIR_ASSIGN(held_->packed, plan_packed(device, shape));
  }
  const bool instead = packing == Packing::kInstead && held_->packed;
  held_->tensors = shape;
  for (Target& target : targets_) {
    if (instead && held_->packed->takes(target.shape_tensor)) continue;
    const ggml_tensor& like = *target.shape_tensor;
    target.expanded = packing == Packing::kExpanded && is_matrix(*target.shape) && like.type != GGML_TYPE_F32;
    target.tensor = target.expanded ? ggml_new_tensor(held_->context.get(), GGML_TYPE_F32, GGML_MAX_DIMS, like.ne)
                                    : ggml_dup_tensor(held_->context.get(), &like);
    ggml_set_name(target.tensor, target.shape_tensor->name);
    *slot_of(held_->tensors, target.shape->id) = target.tensor;
  }
  held_->plain = !instead && packing != Packing::kExpanded;
  held_->bytes = ggml_backend_alloc_ctx_tensors_from_buft_size(held_->context.get(), buffer_type) + packed_bytes();
  return held_->bytes;
}

Status LayerPlan::fill(const Target& target, bool verify) const {
  ggml_tensor* tensor = target.tensor;
  ffn::PackedMatrices* packed = held_->packed && held_->packed->takes(target.shape_tensor) ? &*held_->packed : nullptr;
  const std::size_t slab_bytes = target.shape->bytes_per_expert;
  const bool host = tensor && !target.expanded && ggml_backend_buffer_is_host(tensor->buffer);
  Bytes staging(host ? 0 : slab_bytes);
  std::vector<float> expanded(target.expanded ? static_cast<std::size_t>(tensor->ne[0] * tensor->ne[1]) : 0);
  const ggml_to_float_t to_float = ggml_get_type_traits(target.shape_tensor->type)->to_float;
  if (target.expanded && !to_float)
    return fix_input(std::format("ggml cannot expand the type {} of {}: serve it as it is.",
                                 ggml_type_name(target.shape_tensor->type), target.shape->name));
  ExpertSet filled;
  for (const Source& source : sources_) {
    const gguf::ExpertTensor* from = source.layer->find(target.shape->id.role, target.shape->id.part);
    KVASIR_CHECK(from != nullptr);  // join() has looked
    std::vector<gguf::Hash> hashes;
    if (verify && source.model->kind() == gguf::FileKind::kSlice) {
      KVASIR_ASSIGN(hashes, source.model->slab_hashes(*from));
    }
    std::uint32_t slab = 0;
    for (std::uint32_t expert : source.layer->held.ids()) {
      const std::uint32_t from_slab = slab++;
      if (filled.contains(expert)) continue;
      const std::uint32_t local = *experts_.rank(expert);
      const std::size_t at = local * slab_bytes;
      const std::span<std::byte> bytes =
          host ? std::span(static_cast<std::byte*>(tensor->data) + at, slab_bytes) : std::span(staging);
      KVASIR_TRY(source.model->read_slab(*from, from_slab, bytes));
      if (!hashes.empty()) {
        gguf::Blake3 hasher;
        hasher.update(bytes);
        if (from_slab >= hashes.size() || hasher.finish() != hashes[from_slab])
          return fix_input(std::format("{}: expert {} of {} is damaged (its hash differs): fetch the slice again.",
                                       source.model->file_name(), expert, from->name));
      }
      if (target.expanded) {
        to_float(bytes.data(), expanded.data(), static_cast<std::int64_t>(expanded.size()));
        ggml_backend_tensor_set(tensor, expanded.data(), local * tensor->nb[2], tensor->nb[2]);
      } else if (tensor && !host) ggml_backend_tensor_set(tensor, bytes.data(), at, slab_bytes);
      if (packed) packed->set(target.shape_tensor, local, bytes.data());
    }
    for (const Range& range : source.layer->held.ranges()) filled.add(range);
  }
  return {};
}

Result<HeldLayerPtr> LayerPlan::load(ggml_backend_buffer_type_t buffer_type, bool verify) {
  const Source& first = sources_.front();
  HeldLayer& held = *held_;
  const bool any_plain = std::ranges::any_of(targets_, [](const Target& target) { return target.tensor != nullptr; });
  if (any_plain) held.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(held.context.get(), buffer_type));
  if (any_plain && !held.buffer)
    return retry_later(std::format("There is no room on {} for the {} MiB of layer {}: serve a smaller slice.",
                                   ggml_backend_buft_name(buffer_type), held.bytes >> 20, first.layer->layer));
  if (any_plain) {
    ggml_backend_buffer_set_usage(held.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    if (ggml_backend_buffer_is_host(held.buffer.get())) ffn::prefer_huge_pages(held.buffer.get());
  }
  if (held.packed) KVASIR_TRY(held.packed->allocate());
  for (const Target& target : targets_) KVASIR_TRY(fill(target, verify));

  if (held.packed) {
    // By the shapes that the plan was made of; what is not packed is shared.
    ffn::ExpertTensors shape = held.tensors;
    for (const Target& target : targets_) *slot_of(shape, target.shape->id) = target.shape_tensor;
    ffn::ExpertTensors packed = held.packed->over(shape);
    for (const Target& target : targets_)
      if (!held.packed->takes(target.shape_tensor)) *slot_of(packed, target.shape->id) = target.tensor;
    if (held.plain) held.copies = {held.tensors, packed};
    else held.copies = {held.tensors = packed};
  } else {
    held.copies = {held.tensors};
  }
  held.layer_id = id_;
  held.layer = first.layer->layer;
  held.group = static_cast<wire::ExpertGroup>(first.layer->group);
  held.n_expert = first.layer->n_expert;
  held.model_name = first.model->model_name();
  const ggml_tensor* in = held.tensors.gate_up ? held.tensors.gate_up : held.tensors.up;
  if (!in || !held.tensors.down)
    return fix_input(std::format("{}: layer {} has no up or down weights of experts.", first.model->file_name(),
                                 held.layer));
  held.n_embd = static_cast<std::uint32_t>(in->ne[0]);
  held.local_of.assign(held.n_expert, -1);
  std::int32_t local = 0;
  for (std::uint32_t expert : experts_.ids()) held.local_of[expert] = local++;
  held.experts = std::move(experts_);
  return std::move(held_);
}

}  // namespace kvasir::worker
