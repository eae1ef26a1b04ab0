// Any text as a session grant, changes to a right one, and any payload that the hub has signed: accepted
// is only what the hub signed for this worker and the backbone proved on this connection.

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <format>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/hex.h"
#include "net/grant.h"

namespace {

using namespace kvasir;
using namespace kvasir::net;

constexpr std::uint64_t kNow = 1'800'000'000;
constexpr std::string_view kWorker = "laptop-1a2b";

struct World {
  SigningKey hub = SigningKey::make().value(), backbone = SigningKey::make().value();
  Binding binding = [] {
    Binding out;
    out.fill(std::byte{7});
    return out;
  }();
  std::string token = prove_grant(sign_grant({.backbone = "0123456789abcdef",
                                              .worker = std::string(kWorker),
                                              .model = "qwen",
                                              .expires_unix_s = kNow + kGrantLife_s,
                                              .backbone_key = backbone.public_key()},
                                             hub)
                                      .value(),
                                  backbone, binding);
};

// As the hub would sign it: what is behind the signature is reached, too.
std::string signed_by_the_hub(const World& world, ByteSpan payload) {
  constexpr std::string_view kContext = "kvasir session grant 1";
  Bytes message;
  ByteWriter writer(message);
  writer.put_bytes(kContext);
  writer.put(std::uint8_t{0});
  writer.put_bytes(payload);
  return std::format("grant1.{}.{}", to_hex(payload), to_hex(world.hub.sign(message)));
}

}  // namespace

// The first byte says what the rest is: a token; changes to the right one (place, xor); the expiry and
// names of a grant, or a whole payload, that the hub has signed.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const World world;
  if (size == 0) return 0;
  const ByteSpan rest = std::as_bytes(std::span(data, size)).subspan(1);
  std::string token;
  switch (data[0] % 4) {
    case 0: token.assign(reinterpret_cast<const char*>(rest.data()), rest.size()); break;
    case 1:
      token = world.token;
      for (std::size_t i = 1; i + 2 < size; i += 3) {
        const std::size_t at = (data[i] + std::size_t{256} * data[i + 1]) % (token.size() + 1);
        if (at == token.size()) token.push_back(static_cast<char>(data[i + 2]));
        else token[at] = static_cast<char>(token[at] ^ data[i + 2]);
      }
      break;
    case 2: token = prove_grant(signed_by_the_hub(world, rest), world.backbone, world.binding); break;
    default: {  // the backbone's key is right, the rest is the input's
      Bytes payload(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(rest.size(), 8)));
      payload.resize(8);
      const ByteSpan key(world.backbone.public_key());
      payload.insert(payload.end(), key.begin(), key.end());
      if (rest.size() > 8) payload.insert(payload.end(), rest.begin() + 8, rest.end());
      token = prove_grant(signed_by_the_hub(world, payload), world.backbone, world.binding);
    }
  }
  const auto grant = check_grant(token, world.hub.public_key(), kWorker, world.binding, kNow);
  if (!grant) {
    constexpr std::size_t kTelling = 24;  // shorter, it could be a word of the sentence
    KVASIR_CHECK(!grant.error().message.empty());
    KVASIR_CHECK(token.size() < kTelling || !grant.error().message.contains(token.substr(0, kTelling)));
    return 0;
  }
  KVASIR_CHECK(grant->worker == kWorker && grant->backbone_key == world.backbone.public_key());
  KVASIR_CHECK(grant->expires_unix_s + kGrantClockSkew_s >= kNow &&
               grant->expires_unix_s <= kNow + kGrantLife_s + kGrantClockSkew_s);
  if (data[0] % 4 < 2) {  // hex digits of the proof may be capitals; nothing else may differ
    std::ranges::transform(token, token.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    KVASIR_CHECK(token == world.token);
  }
  // Good on this connection only.
  Binding other = world.binding;
  other[0] ^= std::byte{1};
  KVASIR_CHECK(!check_grant(token, world.hub.public_key(), kWorker, other, kNow));
  return 0;
}
