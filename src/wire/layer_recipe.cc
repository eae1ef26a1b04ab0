// LAYER_RECIPE: the fixed 104 bytes, and what makes a recipe one that can be computed.

#include <bit>
#include <cmath>
#include <format>
#include <initializer_list>
#include <string>

#include "wire/codec.h"

namespace kvasir::wire {
namespace {

enum RecipeFlag : std::uint16_t {
  kGateScale = 1 << 0,
  kUpScale = 1 << 1,
  kDownScale = 1 << 2,
  kGateBias = 1 << 3,
  kUpBias = 1 << 4,
  kDownBias = 1 << 5,
  kClampGate = 1 << 6,
  kClampGateActivated = 1 << 7,
  kClampUp = 1 << 8,
  kAllFlags = (1 << 9) - 1,
};

std::unexpected<Error> refuse(std::string_view why) {
  return fix_input(std::format("the layer recipe is not valid: {}.", why));
}

// Not -0: what is unused has one byte form.
bool is_plain_zero(float value) { return std::bit_cast<std::uint32_t>(value) == 0; }

// An infinite bound means none on that side: ggml_clamp is used so by some architectures.
bool clamp_is_sound(const Clamp& clamp) {
  if (!clamp.enabled) return true;
  return clamp.min <= clamp.max && clamp.min < INFINITY && clamp.max > -INFINITY;  // false for NaN
}

void put_clamp(ByteWriter& out, const Clamp& clamp) {
  out.put(clamp.enabled ? clamp.min : 0.0f);
  out.put(clamp.enabled ? clamp.max : 0.0f);
}

bool get_clamp(ByteCursor& in, bool enabled, Clamp& clamp) {
  clamp = {enabled, in.get<float>(), in.get<float>()};
  return enabled || (is_plain_zero(clamp.min) && is_plain_zero(clamp.max));
}

}  // namespace

Status validate(const Recipe& recipe) {
  if (recipe.group > ExpertGroup::kChexps) return refuse("its expert group is unknown");
  if (recipe.gate_layout > GateLayout::kMerged) return refuse("its gate layout is unknown");
  if (!is_known(recipe.activation)) return refuse("its activation is unknown");
  if (is_gated(recipe.activation) != (recipe.gate_layout != GateLayout::kNone))
    return refuse("its activation does not fit its gate layout");
  // With a merged matrix, `up_scale` and `up_bias` stand for the whole product.
  if (recipe.gate_layout != GateLayout::kSplit && (recipe.gate_scale || recipe.gate_bias))
    return refuse("a gate scale or bias needs a separate gate matrix");
  if (recipe.gate_layout == GateLayout::kNone && recipe.clamp_gate.enabled)
    return refuse("a gate clamp needs a gate");
  // ggml scales contiguous tensors only and aborts on the halves of a merged product.
  if (recipe.gate_layout == GateLayout::kMerged && recipe.activation == Activation::kSoftCapSiluMul)
    return refuse("the soft-capped product needs separate gate and up matrices");
  if (recipe.activation != Activation::kSiluMul && recipe.clamp_gate_activated.enabled)
    return refuse("only the unfused SiLU product has an activated gate to clamp");
  for (const Clamp* clamp : {&recipe.clamp_gate, &recipe.clamp_gate_activated, &recipe.clamp_up})
    if (!clamp_is_sound(*clamp)) return refuse("a clamp's bounds are not numbers in order");
  // Constants an activation does not use are 0, so that equal shapes have equal bytes.
  const bool oai = recipe.activation == Activation::kSwigluOai;
  const bool caps = recipe.activation == Activation::kSoftCapSiluMul;
  const auto sound = [](bool used, float constant) { return used ? std::isfinite(constant) : is_plain_zero(constant); };
  if (!sound(oai, recipe.alpha) || !sound(oai || recipe.activation == Activation::kSwigluClamp, recipe.limit))
    return refuse("alpha and limit must be finite where its activation uses them, and 0 elsewhere");
  for (const SoftCap& cap : {recipe.cap_gate, recipe.cap_up})
    if (!sound(caps, cap.in) || !sound(caps, cap.out))
      return refuse("soft caps must be finite where its activation uses them, and 0 elsewhere");
  if (recipe.n_embd == 0 || recipe.n_embd > kWidthMax || recipe.n_ff == 0 || recipe.n_ff > kWidthMax)
    return refuse(std::format("its widths must lie in 1..{}", kWidthMax));
  if (recipe.n_expert == 0 || recipe.n_expert > kExpertsMax)
    return refuse(std::format("its expert count must lie in 1..{}", kExpertsMax));
  return {};
}

Bytes encode(const LayerRecipe& message) {
  const Recipe& recipe = message.recipe;
  std::uint16_t flags = 0;
  const auto set = [&](bool on, RecipeFlag flag) { flags = static_cast<std::uint16_t>(on ? flags | flag : flags); };
  set(recipe.gate_scale, kGateScale);
  set(recipe.up_scale, kUpScale);
  set(recipe.down_scale, kDownScale);
  set(recipe.gate_bias, kGateBias);
  set(recipe.up_bias, kUpBias);
  set(recipe.down_bias, kDownBias);
  set(recipe.clamp_gate.enabled, kClampGate);
  set(recipe.clamp_gate_activated.enabled, kClampGateActivated);
  set(recipe.clamp_up.enabled, kClampUp);
  Bytes bytes;
  bytes.reserve(kLayerRecipeBytes);
  ByteWriter out(bytes);
  out.put(message.recipe_id);
  out.put_bytes(message.layer_id);
  out.put(recipe.group);
  out.put(recipe.gate_layout);
  out.put(recipe.activation);
  out.put(std::uint8_t{0});
  out.put(flags);
  out.put(std::uint16_t{0});
  for (float constant :
       {recipe.alpha, recipe.limit, recipe.cap_gate.in, recipe.cap_gate.out, recipe.cap_up.in, recipe.cap_up.out})
    out.put(constant);
  put_clamp(out, recipe.clamp_gate);
  put_clamp(out, recipe.clamp_gate_activated);
  put_clamp(out, recipe.clamp_up);
  out.put(recipe.n_embd);
  out.put(recipe.n_ff);
  out.put(recipe.n_expert);
  return bytes;
}

Result<LayerRecipe> decode_layer_recipe(ByteSpan payload) {
  if (payload.size() != kLayerRecipeBytes) return refuse("its length is wrong");
  ByteCursor in(payload);
  LayerRecipe message;
  Recipe& recipe = message.recipe;
  message.recipe_id = in.get<std::uint32_t>();
  if (message.recipe_id >= kRecipesMax) return refuse(std::format("its number must be below {}", kRecipesMax));
  std::ranges::copy(in.get_bytes(message.layer_id.size()), message.layer_id.begin());
  recipe.group = in.get<ExpertGroup>();
  recipe.gate_layout = in.get<GateLayout>();
  recipe.activation = in.get<Activation>();
  const auto reserved_a = in.get<std::uint8_t>();
  const auto flags = in.get<std::uint16_t>();
  const auto reserved_b = in.get<std::uint16_t>();
  if (reserved_a != 0 || reserved_b != 0 || (flags & ~kAllFlags) != 0) return refuse("a reserved bit is set");
  recipe.gate_scale = (flags & kGateScale) != 0;
  recipe.up_scale = (flags & kUpScale) != 0;
  recipe.down_scale = (flags & kDownScale) != 0;
  recipe.gate_bias = (flags & kGateBias) != 0;
  recipe.up_bias = (flags & kUpBias) != 0;
  recipe.down_bias = (flags & kDownBias) != 0;
  for (float* constant :
       {&recipe.alpha, &recipe.limit, &recipe.cap_gate.in, &recipe.cap_gate.out, &recipe.cap_up.in, &recipe.cap_up.out})
    *constant = in.get<float>();
  if (!get_clamp(in, (flags & kClampGate) != 0, recipe.clamp_gate) ||
      !get_clamp(in, (flags & kClampGateActivated) != 0, recipe.clamp_gate_activated) ||
      !get_clamp(in, (flags & kClampUp) != 0, recipe.clamp_up))
    return refuse("the bounds of a clamp that is off must be 0");
  recipe.n_embd = in.get<std::uint32_t>();
  recipe.n_ff = in.get<std::uint32_t>();
  recipe.n_expert = in.get<std::uint32_t>();
  KVASIR_TRY(validate(recipe));
  return message;
}

}  // namespace kvasir::wire
