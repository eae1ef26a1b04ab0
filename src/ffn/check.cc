// Engine::check: whatever passes here, the graph runs without an assertion of ggml's.
#include <format>
#include <string_view>

#include "ffn/engine.h"
#include "ggml.h"
#include "wire/codec.h"

namespace kvasir::ffn {
namespace {

using wire::GateLayout;

// Types ggml's CPU backend multiplies with f32 rows. Q8_1 and Q8_K are for its own
// intermediate rows only and would make it abort.
bool is_matrix_type(ggml_type type) {
  switch (type) {
    case GGML_TYPE_F32:
    case GGML_TYPE_F16:
    case GGML_TYPE_BF16: return true;
    case GGML_TYPE_Q8_1:
    case GGML_TYPE_Q8_K: return false;
    default: return type >= 0 && type < GGML_TYPE_COUNT && ggml_is_quantized(type);
  }
}

std::string_view name_of(const ggml_tensor* tensor, std::string_view role) {
  return tensor->name[0] ? std::string_view(tensor->name) : role;
}

class Checker {
 public:
  explicit Checker(std::uint32_t n_local) : n_local_(n_local) {}

  Status matrix(const ggml_tensor* t, std::string_view role, std::uint64_t n_in, std::uint64_t n_out) const {
    if (!t) return retry_elsewhere(std::format("The recipe needs the tensor {}, which is not held.", role));
    const std::string_view name = name_of(t, role);
    if (!is_matrix_type(t->type))
      return retry_elsewhere(std::format("{} is of type {}, which no expert matrix may have.", name,
                                         ggml_type_name(t->type)));
    if (n_in % static_cast<std::uint64_t>(ggml_blck_size(t->type)) != 0)
      return retry_elsewhere(std::format("{} has rows of {} values, which is not a whole number of {} blocks.", name,
                                         n_in, ggml_type_name(t->type)));
    return shape(t, name, n_in, n_out, n_local_);
  }

  Status optional_matrix(bool wanted, const ggml_tensor* t, std::string_view role, std::uint64_t n_in,
                         std::uint64_t n_out) const {
    return wanted ? matrix(t, role, n_in, n_out) : Status{};
  }

  // Bias [n_out, n_local] or scale [n_local] (as [1, n_local]).
  Status side(bool wanted, const ggml_tensor* t, std::string_view role, std::uint64_t n_out) const {
    if (!wanted) return {};
    if (!t) return retry_elsewhere(std::format("The recipe needs the tensor {}, which is not held.", role));
    const std::string_view name = name_of(t, role);
    if (t->type != GGML_TYPE_F32)
      return retry_elsewhere(std::format("{} is of type {}, but must be F32.", name, ggml_type_name(t->type)));
    if (n_out == 1) return shape(t, name, n_local_, 1, 1);
    return shape(t, name, n_out, n_local_, 1);
  }

 private:
  static Status shape(const ggml_tensor* t, std::string_view name, std::uint64_t n0, std::uint64_t n1,
                      std::uint64_t n2) {
    const auto is = [&](int i) { return static_cast<std::uint64_t>(t->ne[i]); };
    if (is(0) != n0 || is(1) != n1 || is(2) != n2 || is(3) != 1)
      return retry_elsewhere(std::format("{} has the shape [{}, {}, {}], but the recipe needs [{}, {}, {}].", name,
                                         is(0), is(1), is(2), n0, n1, n2));
    if (!ggml_is_contiguous(t)) return retry_elsewhere(std::format("{} is not contiguous.", name));
    return {};
  }

  std::uint32_t n_local_;
};

}  // namespace

Status Engine::check(const wire::Recipe& r, const ExpertTensors& t) {
  KVASIR_TRY(wire::validate(r));
  if (t.n_local == 0 || t.n_local > wire::kExpertsMax)
    return fix_input(std::format("The layer must hold 1 to {} experts, not {}.", wire::kExpertsMax, t.n_local));
  const bool split = r.gate_layout == GateLayout::kSplit, merged = r.gate_layout == GateLayout::kMerged;

  const std::uint64_t n_embd = r.n_embd, n_ff = r.n_ff;
  const Checker c(t.n_local);
  KVASIR_TRY(c.optional_matrix(split, t.gate, "gate", n_embd, n_ff));
  KVASIR_TRY(c.optional_matrix(!merged, t.up, "up", n_embd, n_ff));
  KVASIR_TRY(c.optional_matrix(merged, t.gate_up, "gate_up", n_embd, 2 * n_ff));
  KVASIR_TRY(c.matrix(t.down, "down", n_ff, n_embd));
  KVASIR_TRY(c.side(r.gate_scale, t.gate_scale, "gate_scale", 1));
  KVASIR_TRY(c.side(r.gate_bias, t.gate_bias, "gate_bias", n_ff));
  KVASIR_TRY(c.side(!merged && r.up_scale, t.up_scale, "up_scale", 1));
  KVASIR_TRY(c.side(!merged && r.up_bias, t.up_bias, "up_bias", n_ff));
  KVASIR_TRY(c.side(merged && r.up_scale, t.gate_up_scale, "gate_up_scale", 1));
  KVASIR_TRY(c.side(merged && r.up_bias, t.gate_up_bias, "gate_up_bias", 2 * n_ff));
  KVASIR_TRY(c.side(r.down_scale, t.down_scale, "down_scale", 1));
  KVASIR_TRY(c.side(r.down_bias, t.down_bias, "down_bias", n_embd));
  return {};
}

}  // namespace kvasir::ffn
