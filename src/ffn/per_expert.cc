#include "ffn/per_expert.h"

#include <algorithm>
#include <format>

#include "base/check.h"

namespace kvasir::ffn {
namespace {

// Rows and outputs of one call; larger ones fall out of the cache before they are used.
constexpr std::uint64_t kCallBytes = 8ull << 20;
constexpr std::uint32_t kBlockRowsMax = 256;
// The longest recipe: x, 12 leaves of weights, 3 per path, clamps, activation, views.
constexpr std::size_t kBlockTensorsMax = 48;

constexpr std::array kRoles{MatrixRole::kGate, MatrixRole::kUp, MatrixRole::kGateUp, MatrixRole::kDown};

bool used(const wire::Recipe& r, MatrixRole role) {
  switch (role) {
    case MatrixRole::kGate: return r.gate_layout == wire::GateLayout::kSplit;
    case MatrixRole::kUp: return r.gate_layout != wire::GateLayout::kMerged;
    case MatrixRole::kGateUp: return r.gate_layout == wire::GateLayout::kMerged;
    case MatrixRole::kDown: return true;
  }
  return false;
}

ggml_tensor* part_of(const MatrixTensors& m, char part) { return part == 'm' ? m.matrix : part == 's' ? m.scale : m.bias; }

std::size_t padded(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

std::vector<PerExpertGraph::Kind> PerExpertGraph::kinds_of(const wire::Recipe& recipe, const ExpertTensors& tensors) {
  std::vector<Kind> kinds;
  for (const MatrixRole role : kRoles) {
    if (!used(recipe, role)) continue;
    const ggml_tensor* matrix = MatrixTensors::of(recipe, tensors, role).matrix;
    kinds.push_back({matrix->type, ggml_backend_buffer_get_type(matrix->buffer)});
  }
  return kinds;
}

bool PerExpertGraph::fits(const wire::Recipe& recipe, const ExpertTensors& tensors) const {
  if (recipe != recipe_) return false;
  std::size_t i = 0;
  for (const MatrixRole role : kRoles) {
    if (!used(recipe, role)) continue;
    const ggml_tensor* matrix = MatrixTensors::of(recipe, tensors, role).matrix;
    if (kinds_[i++] != Kind{matrix->type, ggml_backend_buffer_get_type(matrix->buffer)}) return false;
  }
  return true;
}

ggml_tensor* PerExpertGraph::path(Block& block, MatrixRole role, ggml_tensor* x) {
  ggml_context* ctx = context_.get();
  const MatrixTensors m = MatrixTensors::of(recipe_, like_, role);
  const auto leaf = [&](char part, ggml_tensor* tensor) {
    block.weights.push_back({role, part, tensor});
    return tensor;
  };
  const auto of_rows = [&](ggml_tensor* tensor) {
    block.activations.push_back({tensor, 0, false});
    return tensor;
  };
  ggml_tensor* matrix = leaf('m', ggml_new_tensor_2d(ctx, m.matrix->type, m.matrix->ne[0], m.matrix->ne[1]));
  point_at_expert(matrix, m.matrix, expert_bytes_[static_cast<std::size_t>(role)], 0);
  ggml_tensor* y = of_rows(ggml_mul_mat(ctx, matrix, x));
  if (m.scale) y = of_rows(ggml_mul(ctx, y, leaf('s', ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1))));
  if (m.bias) y = of_rows(ggml_add(ctx, y, leaf('b', ggml_new_tensor_1d(ctx, GGML_TYPE_F32, m.bias->ne[0]))));
  return y;
}

Result<std::unique_ptr<PerExpertGraph>> PerExpertGraph::build(const wire::Recipe& recipe, const ExpertTensors& like,
                                                              ggml_backend_dev_t device) {
  auto made = std::make_unique<PerExpertGraph>();
  PerExpertGraph& g = *made;
  g.recipe_ = recipe;
  g.like_ = like;
  g.kinds_ = kinds_of(recipe, like);
  for (const MatrixRole role : kRoles) {
    if (!used(recipe, role)) continue;
    const ggml_tensor* matrix = MatrixTensors::of(recipe, like, role).matrix;
    const Place place = place_of(device, matrix);
    if (!place.single)
      return retry_elsewhere(std::format("The device {} does not multiply single experts of type {}.",
                                         ggml_backend_dev_name(device), ggml_type_name(matrix->type)));
    g.expert_bytes_[static_cast<std::size_t>(role)] = place.expert_bytes;
  }
  const std::uint32_t n_blocks = std::min(kBlocksMax, like.n_local);
  g.call_rows_max_ = static_cast<std::uint32_t>(
      std::max<std::uint64_t>(kCallBytes / (std::uint64_t{2} * recipe.n_embd * sizeof(float)), kBlocksMax));
  g.block_rows_max_ = std::min(kBlockRowsMax, g.call_rows_max_);
  const std::size_t n_nodes = n_blocks * kBlockTensorsMax;
  g.context_.reset(ggml_init({ggml_tensor_overhead() * (n_nodes + 2) + ggml_graph_overhead_custom(n_nodes, false) +
                                  ggml_graph_overhead_custom(kBlockTensorsMax, false), nullptr, /*no_alloc=*/true}));
  ggml_context* ctx = g.context_.get();
  if (!ctx) return retry_later("There is no memory left for another graph.");
  g.graph_ = ggml_new_graph_custom(ctx, n_nodes, false);
  ggml_cgraph* order = ggml_new_graph_custom(ctx, kBlockTensorsMax, false);
  g.all_x_ = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, recipe.n_embd, g.call_rows_max_);
  g.all_out_ = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, recipe.n_embd, g.call_rows_max_);

  g.blocks_.resize(n_blocks);
  for (Block& block : g.blocks_) {
    ggml_tensor* x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, recipe.n_embd, g.block_rows_max_);
    block.activations.push_back({x, 0, true});
    ggml_tensor* out = build_ffn(ctx, recipe, x, [&](MatrixRole role, ggml_tensor* in) { return g.path(block, role, in); });
    KVASIR_CHECK(out != nullptr);
    ggml_graph_clear(order);
    ggml_build_forward_expand(order, out);
    std::size_t offset = 2 * padded(ggml_nbytes(g.all_x_));  // x and out of the call lie first
    for (int i = 0; i < ggml_graph_n_nodes(order); ++i) {
      ggml_tensor* node = ggml_graph_node(order, i);
      block.nodes.push_back(node);
      if (!ggml_backend_dev_supports_op(device, node))
        return retry_elsewhere(std::format("The device {} cannot compute {} for single experts.",
                                           ggml_backend_dev_name(device), ggml_op_desc(node)));
      if (std::ranges::find(block.activations, node, &Activation::tensor) == block.activations.end())
        block.activations.push_back({node, 0, false});
    }
    for (Activation& activation : block.activations) {
      ggml_tensor* t = activation.tensor;
      if (t == x) continue;
      if (t == out) {
        activation.offset = padded(ggml_nbytes(g.all_x_));
        activation.whole_call = true;
      } else if (!t->view_src) {
        activation.offset = offset;
        offset += padded(ggml_nbytes(t));
      }
    }
    g.arena_bytes_ = offset;
  }
  g.arena_.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device), g.arena_bytes_));
  if (!g.arena_) return retry_later("There is no device memory left to compute in.");
  char* base = static_cast<char*>(ggml_backend_buffer_get_base(g.arena_.get()));
  bool movable = ggml_backend_tensor_alloc(g.arena_.get(), g.all_x_, base) == GGML_STATUS_SUCCESS &&
                 ggml_backend_tensor_alloc(g.arena_.get(), g.all_out_, base + padded(ggml_nbytes(g.all_x_))) == GGML_STATUS_SUCCESS;
  for (Block& block : g.blocks_) {
    // Sources before views of them: the order in which they were made.
    for (const Activation& activation : block.activations)
      if (!activation.tensor->view_src)
        movable &= ggml_backend_tensor_alloc(g.arena_.get(), activation.tensor, base + activation.offset) == GGML_STATUS_SUCCESS;
    for (const Activation& activation : block.activations) {
      if (activation.tensor->view_src) movable &= ggml_backend_view_init(activation.tensor) == GGML_STATUS_SUCCESS;
      movable &= activation.tensor->extra == nullptr;  // a backend that keeps its own idea of the address
    }
  }
  if (!movable)
    return retry_elsewhere(std::format("The device {} does not let tensors be moved.", ggml_backend_dev_name(device)));
  return made;
}

std::uint64_t PerExpertGraph::bytes() const { return arena_bytes_; }

void PerExpertGraph::begin(const ExpertTensors& tensors) {
  tensors_ = &tensors;
  n_blocks_ = n_rows_ = 0;
  ggml_graph_clear(graph_);
}

bool PerExpertGraph::has_room(std::uint32_t n_rows) const {
  return n_blocks_ < blocks_.size() && n_rows_ + n_rows <= call_rows_max_;
}

std::uint32_t PerExpertGraph::add(std::uint32_t expert, std::uint32_t n_rows) {
  KVASIR_CHECK(n_rows > 0 && n_rows <= block_rows_max_ && has_room(n_rows));
  Block& block = blocks_[n_blocks_++];
  for (const Weight& weight : block.weights) {
    const ggml_tensor* stack = part_of(MatrixTensors::of(recipe_, *tensors_, weight.role), weight.part);
    const std::size_t bytes = weight.part == 'm'   ? expert_bytes_[static_cast<std::size_t>(weight.role)]
                              : weight.part == 's' ? sizeof(float)
                                                   : stack->nb[1];
    point_at_expert(weight.tensor, stack, bytes, expert);
  }
  place(block, n_rows_, n_rows);
  for (ggml_tensor* node : block.nodes) ggml_graph_add_node(graph_, node);
  const std::uint32_t first = n_rows_;
  n_rows_ += n_rows;
  return first;
}

void PerExpertGraph::place(Block& block, std::uint32_t first_row, std::uint32_t n_rows) {
  char* base = static_cast<char*>(ggml_backend_buffer_get_base(arena_.get()));
  for (const Activation& activation : block.activations) {
    ggml_tensor* t = activation.tensor;
    t->ne[1] = n_rows;
    t->nb[2] = t->nb[3] = t->nb[1] * n_rows;
    if (activation.whole_call) t->data = base + activation.offset + first_row * t->nb[1];
  }
}

float* PerExpertGraph::x() const {
  return ggml_backend_buffer_is_host(arena_.get()) ? static_cast<float*>(all_x_->data) : nullptr;
}
const float* PerExpertGraph::out() const {
  return ggml_backend_buffer_is_host(arena_.get()) ? static_cast<const float*>(all_out_->data) : nullptr;
}
void PerExpertGraph::upload(const float* rows, std::uint32_t n_rows) {
  ggml_backend_tensor_set(all_x_, rows, 0, n_rows * all_x_->nb[1]);
}
void PerExpertGraph::download(float* rows, std::uint32_t n_rows) const {
  ggml_backend_tensor_get(all_out_, rows, 0, n_rows * all_out_->nb[1]);
}

ggml_status PerExpertGraph::run(ggml_backend_t backend) {
  tensors_ = nullptr;
  return ggml_backend_graph_compute(backend, graph_);
}

}  // namespace kvasir::ffn
