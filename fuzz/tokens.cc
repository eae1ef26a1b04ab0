// Any text as a node token: only a token that was made is accepted, and no change to one.

#include <cstdint>
#include <string>
#include <string_view>

#include "base/check.h"
#include "hub/auth/tokens.h"

namespace {

using namespace kvasir;
using namespace kvasir::hub;

struct World {
  std::unique_ptr<Store> store = make_memory_store();
  NewToken valid = make_token(Scope::kWorker, "fuzz", std::nullopt, 1000);
  NewToken expired = make_token(Scope::kAdmin, "fuzz", 500, 100);
  Authenticator authenticator{*store};
  World() {
    KVASIR_CHECK(store->put_token(valid.record));
    KVASIR_CHECK(store->put_token(expired.record));
  }
};

}  // namespace

// The first byte says what the rest is: a token, or changes to the valid one (place, xor).
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static World world;
  if (size == 0) return 0;
  std::string token;
  if (data[0] % 2 == 0) {
    token.assign(reinterpret_cast<const char*>(data) + 1, size - 1);
  } else {
    token = data[0] % 4 == 1 ? world.valid.text : world.expired.text;
    for (std::size_t i = 1; i + 1 < size; i += 2) {
      const std::size_t at = data[i] % (token.size() + 1);
      if (at == token.size()) token.push_back(static_cast<char>(data[i + 1]));
      else token[at] = static_cast<char>(token[at] ^ data[i + 1]);
    }
  }
  const auto principal = world.authenticator.check(token, 1000, TimePoint(std::chrono::hours(1)));
  KVASIR_CHECK(principal.has_value() == (token == world.valid.text));
  if (principal) KVASIR_CHECK(principal->scope == Scope::kWorker && principal->token_id == world.valid.record.id);
  else KVASIR_CHECK(!principal.error().message.empty() && !principal.error().message.contains(world.valid.text));
  return 0;
}
