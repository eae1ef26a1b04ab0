#include "gguf/expert_tensor.h"

#include <array>
#include <charconv>
#include <format>

namespace kvasir::gguf {
namespace {

// Indexed by the enums' values.
constexpr std::array<std::string_view, 2> kGroups = {"exps", "chexps"};
constexpr std::array<std::string_view, 4> kRoles = {"gate", "up", "gate_up", "down"};
constexpr std::array<std::string_view, 4> kParts = {"weight", "bias", "scale", "input_scale"};

template <typename Enum, std::size_t N>
std::optional<Enum> find(const std::array<std::string_view, N>& names, std::string_view text) {
  for (std::size_t i = 0; i < N; ++i)
    if (names[i] == text) return static_cast<Enum>(i);
  return std::nullopt;
}

bool take_prefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

}  // namespace

std::optional<ExpertTensorName> parse_expert_tensor(std::string_view name) {
  if (!take_prefix(name, "blk.")) return std::nullopt;
  ExpertTensorName out;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), out.layer);
  const std::string_view digits = name.substr(0, static_cast<std::size_t>(end - name.data()));
  // One spelling per layer, so that a name can be formed again from its parts.
  if (error != std::errc{} || out.layer >= kMaxLayers || (digits.size() > 1 && digits[0] == '0')) return std::nullopt;
  name.remove_prefix(digits.size());
  if (!take_prefix(name, ".ffn_")) return std::nullopt;
  const std::size_t dot = name.find('.');
  if (dot == std::string_view::npos) return std::nullopt;
  const std::string_view stem = name.substr(0, dot);
  const std::size_t underscore = stem.rfind('_');
  if (underscore == std::string_view::npos) return std::nullopt;
  const auto role = find<ExpertRole>(kRoles, stem.substr(0, underscore));
  const auto group = find<ExpertGroup>(kGroups, stem.substr(underscore + 1));
  const auto part = find<ExpertPart>(kParts, name.substr(dot + 1));
  if (!role || !group || !part) return std::nullopt;
  out.role = *role;
  out.group = *group;
  out.part = *part;
  return out;
}

std::string format_expert_tensor(const ExpertTensorName& name) {
  return std::format("blk.{}.ffn_{}_{}.{}", name.layer, to_string(name.role), to_string(name.group),
                     to_string(name.part));
}

std::string_view to_string(ExpertGroup group) { return kGroups[static_cast<std::size_t>(group)]; }
std::string_view to_string(ExpertRole role) { return kRoles[static_cast<std::size_t>(role)]; }
std::string_view to_string(ExpertPart part) { return kParts[static_cast<std::size_t>(part)]; }

}  // namespace kvasir::gguf
