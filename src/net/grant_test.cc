#include "net/grant.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>

#include "net/stream_pair.h"

namespace kvasir::net {
namespace {

constexpr std::uint64_t kNow = 1'800'000'000;

struct Keys {
  SigningKey hub = SigningKey::make().value(), backbone = SigningKey::make().value();
};

Grant grant_for(const Keys& keys) {
  return {.backbone = "0123456789abcdef",
          .worker = "laptop-1a2b",
          .model = "qwen",
          .expires_unix_s = kNow + kGrantLife_s,
          .backbone_key = keys.backbone.public_key()};
}

Binding binding(unsigned char fill) {
  Binding out;
  out.fill(std::byte{fill});
  return out;
}

std::string why_not(const Result<Grant>& checked) { return checked ? "" : checked.error().message; }

TEST(Grants, RoundTrip) {
  const Keys keys;
  const Grant grant = grant_for(keys);
  const std::string signed_grant = sign_grant(grant, keys.hub).value();
  EXPECT_TRUE(is_grant(signed_grant));
  EXPECT_FALSE(is_grant("kvasir_0123_4567"));
  const std::string token = prove_grant(signed_grant, keys.backbone, binding(1));
  EXPECT_LE(token.size(), 1024u);  // fits HELLO
  const auto checked = check_grant(token, keys.hub.public_key(), "laptop-1a2b", binding(1), kNow);
  ASSERT_TRUE(checked) << checked.error().message;
  EXPECT_EQ(*checked, grant);
  Grant longest = grant;
  longest.worker = longest.model = longest.backbone = std::string(kGrantNameBytesMax, 'w');
  EXPECT_LE(prove_grant(sign_grant(longest, keys.hub).value(), keys.backbone, binding(1)).size(), 1024u);
  longest.worker += 'w';
  EXPECT_FALSE(sign_grant(longest, keys.hub));
}

TEST(Grants, Refusals) {
  const Keys keys, others;
  const std::string signed_grant = sign_grant(grant_for(keys), keys.hub).value();
  const std::string token = prove_grant(signed_grant, keys.backbone, binding(1));
  const auto check = [&](std::string_view shown, unsigned char on = 1, std::uint64_t now = kNow, const char* worker = "laptop-1a2b") {
    return why_not(check_grant(shown, keys.hub.public_key(), worker, binding(on), now));
  };
  EXPECT_EQ(check(token), "");
  // Shown on another connection: a replay.
  EXPECT_NE(check(token, 2).find("another connection"), std::string::npos);
  // Copied and proved with a key of one's own.
  EXPECT_NE(check(prove_grant(signed_grant, others.backbone, binding(1))).find("somebody else"), std::string::npos);
  EXPECT_NE(check(token, 1, kNow, "desktop").find("another worker"), std::string::npos);
  EXPECT_NE(check(token, 1, kNow + kGrantLife_s + kGrantClockSkew_s + 1).find("expired"), std::string::npos);
  EXPECT_NE(check(token, 1, kNow - 3600).find("clock"), std::string::npos);
  EXPECT_NE(check(prove_grant(sign_grant(grant_for(keys), others.hub).value(), keys.backbone, binding(1))).find("not signed"),
            std::string::npos);
  EXPECT_NE(check(signed_grant).find("malformed"), std::string::npos);
  for (const char* wrong : {"grant1.", "grant1..", "grant1.00.00", "grant1.zz.zz.zz", "grant1.00.00.00.00"})
    EXPECT_NE(check(wrong).find("malformed"), std::string::npos) << wrong;
}

// Every single flipped digit is noticed.
TEST(Grants, AnyChangeIsRefused) {
  const Keys keys;
  const std::string token = prove_grant(sign_grant(grant_for(keys), keys.hub).value(), keys.backbone, binding(1));
  for (std::size_t i = 0; i < token.size(); ++i) {
    std::string changed = token;
    changed[i] = changed[i] == '0' ? '1' : '0';
    if (changed == token) continue;
    EXPECT_FALSE(check_grant(changed, keys.hub.public_key(), "laptop-1a2b", binding(1), kNow)) << i;
  }
}

TEST(Grants, TheKeyIsKeptPrivate) {
  char folder[] = "/tmp/kvasir-grant-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const std::filesystem::path file = std::filesystem::path(folder) / "grant-key.pem";
  const auto first = SigningKey::load_or_make(file);
  ASSERT_TRUE(first) << first.error().message;
  struct stat info {};
  ASSERT_EQ(::stat(file.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(SigningKey::load_or_make(file)->public_key(), first->public_key());
  ASSERT_EQ(::chmod(file.c_str(), 0644), 0);
  EXPECT_FALSE(SigningKey::load_or_make(file));
  std::filesystem::remove_all(folder);
}

// The binding is the same at both ends of a connection, and another on each.
TEST(Grants, BindingsOfConnections) {
  std::vector<Binding> seen;
  for (int i = 0; i < 2; ++i) {
    const StreamPair pair = stream_pair(Kind::kTls);
    const auto client = tls_state(*pair.client), server = tls_state(*pair.server);
    ASSERT_TRUE(client && server);
    EXPECT_EQ(client->binding, server->binding);
    EXPECT_TRUE(i == 0 || client->resumed);  // the second takes the session of the first up again
    EXPECT_EQ(server->resumed, client->resumed);
    seen.push_back(client->binding);
  }
  EXPECT_NE(seen[0], seen[1]);
  EXPECT_FALSE(tls_state(*stream_pair(Kind::kPlain).client));
}

}  // namespace
}  // namespace kvasir::net
