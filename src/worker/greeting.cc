#include "worker/greeting.h"

#include <format>

#include "base/hex.h"

namespace kvasir::worker {

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

std::string describe_difference(const wire::NumericsId& ours, const wire::NumericsId& theirs) {
  if (ours.ggml_version != theirs.ggml_version)
    return std::format("This worker computes with ggml {}, the backbone with ggml {}: install the same version.",
                       ours.ggml_version, theirs.ggml_version);
  if (ours.cpu_variant != theirs.cpu_variant)
    return std::format("This worker computes with '{}', the backbone with '{}': the bits would differ.",
                       ours.cpu_variant, theirs.cpu_variant);
  if (ours.probe != theirs.probe)
    return std::format("The probe of this worker's kernels gives {}…, the backbone's {}…: the bits would differ.",
                       to_hex(ByteSpan(ours.probe).first(4)), to_hex(ByteSpan(theirs.probe).first(4)));
  return {};
}

std::optional<wire::ErrorMessage> refuse_hello(const wire::Hello& peer, const wire::NumericsId& ours,
                                               std::string_view token, bool plain) {
  using wire::ErrorCode;
  if (!token.empty() && !equal_in_constant_time(peer.token, token))
    return wire::ErrorMessage{ErrorCode::kUnauthorized, "This worker asks for a node token, and the one given is not it."};
  if (peer.protocol_version != wire::kProtocolVersion)
    return wire::ErrorMessage{ErrorCode::kWrongVersion,
                              std::format("This worker speaks protocol version {}, the backbone {}: update the older one.",
                                          wire::kProtocolVersion, peer.protocol_version)};
  if (peer.role != wire::Role::kBackbone)
    return wire::ErrorMessage{ErrorCode::kMalformed, "Only a backbone connects to a worker."};
  if (peer.numerics != wire::Numerics::kFast && !plain)
    return wire::ErrorMessage{ErrorCode::kNumerics,
                              "This worker was started with --numerics fast or --weights f32: its weights serve class fast, and "
                              "no other class. Ask for KVASIR_NUMERICS=fast, or start it without."};
  if (peer.numerics != wire::Numerics::kFast) {
    const std::string difference = describe_difference(ours, peer.numerics_id);
    if (!difference.empty())
      return wire::ErrorMessage{ErrorCode::kNumerics, difference + " Numerics class fast would pair."};
  }
  return std::nullopt;
}

}  // namespace kvasir::worker
