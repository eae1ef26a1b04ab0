// Which tensors belong to routed experts, by name:
//   blk.N.ffn_{gate,up,down,gate_up}_{exps,chexps}.{weight,bias,scale,input_scale}
// The same parser serves files and the tensors of a running llama.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvasir::gguf {

// Values equal wire::ExpertGroup.
enum class ExpertGroup : std::uint8_t { kExps = 0, kChexps = 1 };
enum class ExpertRole : std::uint8_t { kGate, kUp, kGateUp, kDown };
enum class ExpertPart : std::uint8_t { kWeight, kBias, kScale, kInputScale };

inline constexpr std::uint32_t kMaxLayers = 16 * 1024;
inline constexpr std::uint32_t kMaxExperts = 64 * 1024;  // of one layer

struct ExpertTensorName {
  std::uint32_t layer = 0;
  ExpertGroup group{};
  ExpertRole role{};
  ExpertPart part{};
  friend bool operator==(const ExpertTensorName&, const ExpertTensorName&) = default;
};

// nullopt for every other name, such as attn_v_exps, ffn_norm_exps, ffn_gate_inp, *_shexp.
std::optional<ExpertTensorName> parse_expert_tensor(std::string_view name);
std::string format_expert_tensor(const ExpertTensorName& name);

std::string_view to_string(ExpertGroup group);  // "exps"
std::string_view to_string(ExpertRole role);    // "gate_up"
std::string_view to_string(ExpertPart part);    // "input_scale"

}  // namespace kvasir::gguf
