// LAYER_RECIPE: the shape of one layer's expert FFN, as a closed description.
//
// The backbone derives it from llama.cpp's graph; a worker needs nothing else to compute
// the layer. Every field maps to a fixed sequence of ggml operations, so that both ends run
// the same kernels on the same values. There is no op code and no graph on the wire.
//
//   gate    = W_gate · x [* gate_scale[e]] [+ gate_bias[e]]      (kSplit; absent with kNone)
//   up      = W_up   · x [* up_scale[e]]   [+ up_bias[e]]
//   kMerged: one W_gate_up · x; the first n_ff values are gate, the next n_ff are up;
//            up_scale and up_bias then apply to the whole product.
//   hidden  = activation(gate, up)
//   expert  = W_down · hidden [* down_scale[e]] [+ down_bias[e]]
#pragma once

#include <cstdint>

namespace kvasir::wire {

// Which stack of experts in a layer: most models have one; grovemoe adds chunk experts.
enum class ExpertGroup : std::uint8_t { kExps = 0, kChexps = 1 };

enum class GateLayout : std::uint8_t { kNone = 0, kSplit = 1, kMerged = 2 };

// Named after the ggml operations they run.
enum class Activation : std::uint8_t {
  // With a gate (kSplit, kMerged):
  kSwiglu = 0,      // ggml_swiglu_split(gate, up)
  kGeglu = 1,       // ggml_geglu_split
  kReglu = 2,       // ggml_reglu_split
  kGegluErf = 3,    // ggml_geglu_erf_split
  kGegluQuick = 4,  // ggml_geglu_quick_split
  kSwigluOai = 5,   // ggml_swiglu_oai(gate, up, alpha, limit)
  kSwigluClamp = 6,  // ggml_swiglu_clamp(gate, up, limit)
  kSiluMul = 7,     // ggml_mul(clamp(silu(gate)), up), unfused
  kSoftCapSiluMul = 8,  // ggml_mul(ggml_mul(cap(gate), sigmoid(gate)), cap(up)), cap as in SoftCap; kSplit only
  // Without a gate (kNone), on `up`:
  kSilu = 16,
  kGelu = 17,
  kRelu = 18,
  kReluSqr = 19,  // ggml_sqr(ggml_relu(up))
  kGeluErf = 20,
  kGeluQuick = 21,
};

inline constexpr bool is_gated(Activation activation) { return activation < Activation::kSilu; }
inline constexpr bool is_known(Activation activation) {
  return activation <= Activation::kSoftCapSiluMul ||
         (activation >= Activation::kSilu && activation <= Activation::kGeluQuick);
}

// ggml_scale(ggml_tanh(ggml_scale(x, in)), out): x bent smoothly below `out`.
struct SoftCap {
  float in = 0;
  float out = 0;
  friend bool operator==(const SoftCap&, const SoftCap&) = default;
};

// A ggml_clamp; used only where `enabled`.
struct Clamp {
  bool enabled = false;
  float min = 0;
  float max = 0;
  friend bool operator==(const Clamp&, const Clamp&) = default;
};

struct Recipe {
  ExpertGroup group = ExpertGroup::kExps;
  GateLayout gate_layout = GateLayout::kSplit;
  Activation activation = Activation::kSwiglu;
  // Order per path: matrix, then scale, then bias.
  bool gate_scale = false, up_scale = false, down_scale = false;
  bool gate_bias = false, up_bias = false, down_bias = false;
  float alpha = 0;                     // kSwigluOai
  float limit = 0;                     // kSwigluOai, kSwigluClamp
  SoftCap cap_gate{}, cap_up{};        // kSoftCapSiluMul
  Clamp clamp_gate{};                  // before the activation
  Clamp clamp_gate_activated{};          // kSiluMul: after silu
  Clamp clamp_up{};                    // before the activation
  std::uint32_t n_embd = 0;            // width of a row in and out
  std::uint32_t n_ff = 0;              // width of `hidden`
  std::uint32_t n_expert = 0;          // experts of the whole layer, held or not
  friend bool operator==(const Recipe&, const Recipe&) = default;
};

}  // namespace kvasir::wire
