// A node token for the holder of an admitted ed25519 key: the hub gives a nonce, the node
// signs its text, the hub gives a token that lasts a day.

#include <format>

#include "base/hex.h"
#include "hub/auth/secrets.h"
#include "hub/http/hub.h"
#include "hub/http/json_input.h"

namespace kvasir::hub {
namespace {

using nlohmann::json;

constexpr UnixSeconds kKeyTokenLifeS = 24 * 3600;
// In front of the random part, so that the signature is good for nothing else.
constexpr std::string_view kNoncePrefix = "kvasir-node-token:";

Result<std::string> public_key_of(const JsonInput& input) {
  KVASIR_ASSIGN(const std::string text, input.text("public_key", 2 * kEd25519KeyBytes));
  const auto key = from_hex(text);
  if (!key || key->size() != kEd25519KeyBytes)
    return fix_input("'public_key' must be 64 hexadecimal digits: an ed25519 public key.");
  return to_hex(*key);  // one spelling
}

Response challenge(Hub& hub, const Request& request) {
  const auto input = JsonInput::parse(request.body);
  if (!input) return error_response(input.error());
  const auto key = public_key_of(*input);
  if (!key) return error_response(key.error());
  const std::string nonce = std::string(kNoncePrefix) + random_hex(32);
  const MutexLock lock(hub.nonces_mutex);
  hub.nonces.issue(nonce, *key, request.now);
  Response out;
  out.text = dump(
      {{"nonce", nonce}, {"expires_in_s", std::chrono::duration_cast<std::chrono::seconds>(hub.nonces.ttl()).count()}});
  return out;
}

Response node_token(Hub& hub, const Request& request) {
  const auto input = JsonInput::parse(request.body);
  if (!input) return error_response(input.error());
  const auto key = public_key_of(*input);
  if (!key) return error_response(key.error());
  const auto nonce = input->text("nonce", 256);
  if (!nonce) return error_response(nonce.error());
  const auto signature_text = input->text("signature", 2 * kEd25519SignatureBytes);
  if (!signature_text) return error_response(signature_text.error());
  const auto signature = from_hex(*signature_text);
  if (!signature || signature->size() != kEd25519SignatureBytes)
    return error_response(400, "'signature' must be 128 hexadecimal digits: the ed25519 signature of the nonce.");
  {
    const MutexLock lock(hub.nonces_mutex);
    if (!hub.nonces.redeem(*nonce, *key, request.now))
      return error_response(401, "this nonce was not given for this key, was used, or is too old; ask for another.");
  }
  if (!verify_ed25519(*from_hex(*key), *nonce, *signature))
    return error_response(401, "the signature does not fit the nonce and the key.");
  const auto record = hub.store().find_key(*key);
  if (!record) {
    hub.log_error(record.error());
    return error_response(503, "the hub cannot look keys up just now; try again in a moment.");
  }
  if (!*record || (*record)->revoked) return error_response(403, "the operator of this hub has not admitted this key.");
  const UnixSeconds now = unix_now();
  const NewToken made = make_token((*record)->scope, std::format("key {}", *key), now + kKeyTokenLifeS, now);
  if (const Status put = hub.store().put_token(made.record); !put) {
    hub.log_error(put.error());
    return error_response(503, "the hub cannot keep tokens just now; try again in a moment.");
  }
  Response out;
  out.text = dump({{"token", made.text},
                   {"token_id", made.record.id},
                   {"scope", to_string(made.record.scope)},
                   {"expires_in_s", kKeyTokenLifeS}});
  return out;
}

}  // namespace

void add_auth_routes(Router& router, Hub& hub) {
  router.add({.method = "POST",
              .pattern = "/api/auth/challenge",
              .summary = "A nonce to sign with an ed25519 key",
              .scopes = {},
              .query = {},
              .body_example = R"({"public_key":"00"})",
              .answer_example = R"({"nonce":"kvasir-node-token:00","expires_in_s":60})",
              .handler = [&hub](const Request& request) { return challenge(hub, request); }});
  router.add({.method = "POST",
              .pattern = "/api/auth/node-token",
              .summary = "A node token for the signature of the nonce's text, where the operator admits the key",
              .scopes = {},
              .query = {},
              .body_example = R"({"public_key":"00","nonce":"kvasir-node-token:00","signature":"00"})",
              .answer_example = R"({"token":"kvasir_…","token_id":"00","scope":"worker","expires_in_s":86400})",
              .handler = [&hub](const Request& request) { return node_token(hub, request); }});
}

}  // namespace kvasir::hub
