#include "net/websocket_handshake.h"

#include <openssl/evp.h>
#include <openssl/rand.h>

#include <algorithm>
#include <array>
#include <format>
#include <span>

#include "base/bytes.h"

namespace kvasir::net::websocket {
namespace {

constexpr std::size_t kSentenceBytesMax = 300;  // of a hub's refusal that is repeated

std::string base64(ByteSpan bytes) {
  std::string out(4 * ((bytes.size() + 2) / 3) + 1, '\0');
  const int n = EVP_EncodeBlock(reinterpret_cast<unsigned char*>(out.data()),
                                reinterpret_cast<const unsigned char*>(bytes.data()), static_cast<int>(bytes.size()));
  out.resize(static_cast<std::size_t>(n));
  return out;
}
std::string base64(std::string_view text) { return base64(std::as_bytes(std::span(text))); }

}  // namespace

std::string connect_request(const std::string& authority, const std::string& credentials) {
  const std::string proof =
      credentials.empty() ? std::string() : std::format("Proxy-Authorization: Basic {}\r\n", base64(credentials));
  return std::format("CONNECT {0} HTTP/1.1\r\nHost: {0}\r\nUser-Agent: kvasir\r\n{1}\r\n", authority, proof);
}

std::string make_key() {
  std::array<std::byte, 16> nonce;
  RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), nonce.size());
  return base64(nonce);
}

std::string upgrade_request(const std::string& target, const std::string& authority, const std::string& key,
                            const std::string& token) {
  return std::format(
      "GET {} HTTP/1.1\r\nHost: {}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
      "Sec-WebSocket-Key: {}\r\nAuthorization: Bearer {}\r\nUser-Agent: kvasir\r\n\r\n",
      target, authority, key, token);
}

std::string accept_of(const std::string& key) {
  const std::string text = key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
  std::array<std::byte, EVP_MAX_MD_SIZE> digest;
  unsigned n = 0;
  EVP_Digest(text.data(), text.size(), reinterpret_cast<unsigned char*>(digest.data()), &n, EVP_sha1(), nullptr);
  return base64(std::span(digest).first(n));
}

std::string url_encoded(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' ||
                       c == '.' || c == '_' || c == '~';
    if (plain) out += c;
    else out += std::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return out;
}

std::string sentence_of(const std::string& body) {
  constexpr std::string_view kBefore = R"("error":")";
  const std::size_t at = body.find(kBefore);
  if (at == std::string::npos) return {};
  const std::size_t begin = at + kBefore.size(), end = body.find('"', begin);
  std::string out = body.substr(begin, std::min(end - begin, kSentenceBytesMax));
  const bool plain = std::ranges::all_of(out, [](unsigned char c) { return c >= 0x20 && c != 0x7f && c != '\\'; });
  return plain ? out : std::string();
}

Error refused_by(unsigned status, const std::string& body) {
  const bool ours = status == 400 || status == 401 || status == 403;
  std::string sentence = sentence_of(body);
  if (sentence.empty()) sentence = std::format("it answered with status {}; is it a hub of this version?", status);
  return {ours ? ErrorAction::kFixInput : ErrorAction::kRetryLater, "the relay refuses: " + sentence};
}

}  // namespace kvasir::net::websocket
