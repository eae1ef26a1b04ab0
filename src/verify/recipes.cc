#include "verify/recipes.h"

#include <array>
#include <format>

#include "wire/codec.h"

namespace kvasir::verify {
namespace {

using gguf::ExpertPart;
using gguf::ExpertRole;
using wire::Activation;
using wire::GateLayout;

// Architectures whose experts do not use SiLU, as llama.cpp builds them. Experts without a
// gate use squared ReLU in all architectures so far.
struct Known {
  std::string_view architecture;
  Activation activation;
  float alpha = 0, limit = 0;
};
constexpr auto kKnown = std::to_array<Known>({
    {"gpt-oss", Activation::kSwigluOai, 1.702f, 7.0f},
    {"grok", Activation::kGeglu},
    {"gemma4", Activation::kGeglu},
});

}  // namespace

Result<wire::Recipe> recipe_from_file(const gguf::MoeModel& model, const gguf::LayerExperts& layer) {
  const auto has = [&](ExpertRole role, ExpertPart part) {
    const gguf::ExpertTensor* tensor = layer.find(role, part);
    return tensor != nullptr && tensor->per_expert;
  };
  wire::Recipe r;
  r.group = static_cast<wire::ExpertGroup>(layer.group);
  const bool merged = has(ExpertRole::kGateUp, ExpertPart::kWeight);
  const ExpertRole wide = merged ? ExpertRole::kGateUp : ExpertRole::kUp;
  r.gate_layout = merged ? GateLayout::kMerged : has(ExpertRole::kGate, ExpertPart::kWeight) ? GateLayout::kSplit : GateLayout::kNone;
  if (!has(wide, ExpertPart::kWeight) || !has(ExpertRole::kDown, ExpertPart::kWeight))
    return fix_input(std::format("{}: layer {} lacks the up or the down weights of its experts.", model.file_name(), layer.layer));
  r.up_bias = has(wide, ExpertPart::kBias);
  r.up_scale = has(wide, ExpertPart::kScale);
  r.gate_bias = r.gate_layout == GateLayout::kSplit && has(ExpertRole::kGate, ExpertPart::kBias);
  r.gate_scale = r.gate_layout == GateLayout::kSplit && has(ExpertRole::kGate, ExpertPart::kScale);
  r.down_bias = has(ExpertRole::kDown, ExpertPart::kBias);
  r.down_scale = has(ExpertRole::kDown, ExpertPart::kScale);
  r.activation = r.gate_layout == GateLayout::kNone ? Activation::kReluSqr : Activation::kSwiglu;
  if (r.gate_layout != GateLayout::kNone) {
    for (const Known& known : kKnown) {
      if (known.architecture != model.architecture()) continue;
      r.activation = known.activation;
      r.alpha = known.alpha;
      r.limit = known.limit;
    }
  }
  const gguf::Shape& down = layer.find(ExpertRole::kDown, ExpertPart::kWeight)->ne;
  if (down[0] > wire::kWidthMax || down[1] > wire::kWidthMax)
    return fix_input(std::format("{}: the experts of layer {} are wider than {}.", model.file_name(), layer.layer, wire::kWidthMax));
  r.n_ff = static_cast<std::uint32_t>(down[0]);
  r.n_embd = static_cast<std::uint32_t>(down[1]);
  r.n_expert = layer.n_expert;
  KVASIR_TRY(wire::validate(r));
  return r;
}

std::string describe(const wire::Recipe& r) {
  constexpr std::string_view kLayouts[] = {"ungated", "split", "merged"};
  constexpr std::string_view kGated[] = {"swiglu",     "geglu",        "reglu",   "geglu_erf",        "geglu_quick",
                                         "swiglu_oai", "swiglu_clamp", "silu_mul", "soft_cap_silu_mul"};
  constexpr std::string_view kUngated[] = {"silu", "gelu", "relu", "relu_sqr", "gelu_erf", "gelu_quick"};
  const auto index = static_cast<std::size_t>(r.activation);
  const std::string_view activation =
      wire::is_gated(r.activation) ? kGated[index] : kUngated[index - static_cast<std::size_t>(Activation::kSilu)];
  std::string out = std::format("{} {} {}->{}->{}", kLayouts[static_cast<std::size_t>(r.gate_layout)], activation, r.n_embd, r.n_ff, r.n_embd);
  if (r.gate_bias || r.up_bias || r.down_bias) out += " +bias";
  if (r.gate_scale || r.up_scale || r.down_scale) out += " +scale";
  if (r.clamp_gate.enabled || r.clamp_up.enabled || r.clamp_gate_activated.enabled) out += " +clamp";
  return out;
}

}  // namespace kvasir::verify
