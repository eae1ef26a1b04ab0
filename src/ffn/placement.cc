#include "ffn/placement.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <format>

#include "base/check.h"

namespace kvasir::ffn {
namespace {

constexpr std::size_t kMatricesMax = 4;
constexpr std::int64_t kProbeRows = 64;  // any number: no known answer of supports_op depends on it

std::size_t padded(std::size_t bytes, std::size_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

constexpr ggml_tensor* ExpertTensors::* kMatrices[] = {&ExpertTensors::gate, &ExpertTensors::up, &ExpertTensors::gate_up,
                                                       &ExpertTensors::down};

}  // namespace

std::vector<ggml_backend_buffer_type_t> extra_buffer_types(ggml_backend_dev_t device) {
  std::vector<ggml_backend_buffer_type_t> types;
  auto list = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_reg_get_proc_address(
      ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
  ggml_backend_buffer_type_t* type = list ? list(device) : nullptr;
  for (; type && *type; ++type) types.push_back(*type);
  return types;
}

std::optional<Place> find_place(ggml_backend_dev_t device, ggml_backend_buffer_type_t buffer_type, ggml_type type,
                                std::int64_t n_in, std::int64_t n_out, std::int64_t n_local) {
  ggml_context_ptr context(ggml_init({ggml_tensor_overhead() * 8, nullptr, /*no_alloc=*/true}));
  // supports_op looks at the weights' buffer only: one without bytes will do.
  ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(buffer_type, 0));
  if (!context || !buffer) return std::nullopt;
  ggml_context* ctx = context.get();
  ggml_tensor* stack = ggml_new_tensor_3d(ctx, type, n_in, n_out, n_local);
  ggml_tensor* single = ggml_new_tensor_2d(ctx, type, n_in, n_out);
  stack->buffer = single->buffer = buffer.get();
  ggml_tensor* x3 = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, n_in, 1, kProbeRows);
  ggml_tensor* x2 = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_in, kProbeRows);
  ggml_tensor* ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, kProbeRows);
  const Place place{
      .expert_bytes = padded(ggml_backend_buft_get_alloc_size(buffer_type, single),
                             // Stacks must lie without gaps, as MUL_MAT_ID reads them.
                             ggml_backend_buft_get_alloc_size(buffer_type, single) == ggml_nbytes(single)
                                 ? 1 : ggml_backend_buft_get_alignment(buffer_type)),
      .stacked = ggml_backend_dev_supports_op(device, ggml_mul_mat_id(ctx, stack, x3, ids)),
      .single = ggml_backend_dev_supports_op(device, ggml_mul_mat(ctx, single, x2))};
  if (!place.stacked && !place.single) return std::nullopt;
  return place;
}

Place place_of(ggml_backend_dev_t device, const ggml_tensor* stack) {
  return find_place(device, ggml_backend_buffer_get_type(stack->buffer), stack->type, stack->ne[0], stack->ne[1], stack->ne[2])
      .value_or(Place{.expert_bytes = stack->nb[2]});
}

void point_at_expert(ggml_tensor* single, const ggml_tensor* stack, std::size_t expert_bytes, std::uint32_t expert) {
  single->buffer = nullptr;
  single->data = nullptr;
  const ggml_status placed =
      ggml_backend_tensor_alloc(stack->buffer, single, static_cast<char*>(stack->data) + expert * expert_bytes);
  KVASIR_CHECK(placed == GGML_STATUS_SUCCESS);
}

Result<PackedMatrices> PackedMatrices::plan(ggml_backend_dev_t device, ggml_backend_buffer_type_t buffer_type,
                                            const ExpertTensors& shape) {
  PackedMatrices packed;
  packed.buffer_type_ = buffer_type;
  packed.context_.reset(ggml_init({ggml_tensor_overhead() * 2 * kMatricesMax, nullptr, /*no_alloc=*/true}));
  ggml_context* ctx = packed.context_.get();
  if (!ctx) return retry_later("There is no memory left for the list of packed tensors.");
  const std::size_t alignment = ggml_backend_buft_get_alignment(buffer_type);
  for (const auto member : kMatrices) {
    const ggml_tensor* t = shape.*member;
    if (!t) continue;
    const std::optional<Place> place = find_place(device, buffer_type, t->type, t->ne[0], t->ne[1], t->ne[2]);
    if (!place || !place->single) continue;
    Stack stack{.of_shape = t,
                .tensor = ggml_new_tensor_3d(ctx, t->type, t->ne[0], t->ne[1], t->ne[2]),
                .single = ggml_new_tensor_2d(ctx, t->type, t->ne[0], t->ne[1]),
                .expert_bytes = place->expert_bytes,
                .offset = packed.bytes_};
    ggml_set_name(stack.tensor, t->name);
    packed.stacks_.push_back(stack);
    packed.bytes_ += padded(place->expert_bytes * static_cast<std::size_t>(t->ne[2]), alignment);
  }
  return packed;
}

bool PackedMatrices::takes(const ggml_tensor* of_shape) const {
  return std::ranges::find(stacks_, of_shape, &Stack::of_shape) != stacks_.end();
}

Status PackedMatrices::allocate() {
  buffer_.reset(ggml_backend_buft_alloc_buffer(buffer_type_, bytes_));
  if (!buffer_)
    return retry_later(std::format("There is no room for the {} MiB of experts in {}.", bytes_ >> 20,
                                   ggml_backend_buft_name(buffer_type_)));
  ggml_backend_buffer_set_usage(buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  prefer_huge_pages(buffer_.get());
  char* base = static_cast<char*>(ggml_backend_buffer_get_base(buffer_.get()));
  for (const Stack& stack : stacks_) {
    if (ggml_backend_tensor_alloc(buffer_.get(), stack.tensor, base + stack.offset) != GGML_STATUS_SUCCESS)
      return fatal(std::format("{} does not take {}.", ggml_backend_buft_name(buffer_type_), stack.tensor->name));
  }
  return {};
}

void PackedMatrices::set(const ggml_tensor* of_shape, std::uint32_t expert, const void* slab) {
  const auto stack = std::ranges::find(stacks_, of_shape, &Stack::of_shape);
  KVASIR_CHECK(stack != stacks_.end());
  point_at_expert(stack->single, stack->tensor, stack->expert_bytes, expert);
  ggml_backend_tensor_set(stack->single, slab, 0, ggml_nbytes(stack->single));
}

ExpertTensors PackedMatrices::over(const ExpertTensors& shape) const {
  ExpertTensors tensors = shape;
  for (const auto member : kMatrices) {
    const auto stack = std::ranges::find(stacks_, static_cast<const ggml_tensor*>(shape.*member), &Stack::of_shape);
    if (shape.*member && stack != stacks_.end()) tensors.*member = stack->tensor;
  }
  return tensors;
}

void prefer_huge_pages(ggml_backend_buffer_t buffer) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto base = reinterpret_cast<std::uintptr_t>(ggml_backend_buffer_get_base(buffer));
  const std::uintptr_t begin = (base + page - 1) / page * page;
  const std::uintptr_t end = (base + ggml_backend_buffer_get_size(buffer)) / page * page;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace kvasir::ffn
