#include <gtest/gtest.h>
#include <openssl/evp.h>

#include "base/hex.h"
#include "hub/auth/secrets.h"
#include "hub/auth/tokens.h"

namespace kvasir::hub {
namespace {

TimePoint at(double s) { return TimePoint(std::chrono::duration_cast<Nanos>(std::chrono::duration<double>(s))); }

TEST(Tokens, OnlyTheWholeTokenIsGood) {
  const auto store = make_memory_store();
  const NewToken made = make_token(Scope::kWorker, "laptop", std::nullopt, 100);
  ASSERT_TRUE(store->put_token(made.record));
  EXPECT_EQ(made.record.secret_hash.find(made.text.substr(24)), std::string::npos);
  Authenticator auth(*store);
  const auto good = auth.check(made.text, 100, at(0));
  ASSERT_TRUE(good);
  EXPECT_EQ(good->token_id, made.record.id);
  EXPECT_EQ(good->scope, Scope::kWorker);
  for (std::size_t i = 0; i < made.text.size(); ++i) {
    std::string wrong = made.text;
    wrong[i] = wrong[i] == '0' ? '1' : '0';
    EXPECT_FALSE(auth.check(wrong, 100, at(0))) << i;
    EXPECT_FALSE(auth.check(made.text.substr(0, i), 100, at(0))) << i;
  }
  EXPECT_FALSE(auth.check(made.text + "0", 100, at(0)));
  EXPECT_FALSE(auth.check("", 100, at(0)));
}

TEST(Tokens, ExpiryAndRevocationActSoon) {
  const auto store = make_memory_store();
  const NewToken short_lived = make_token(Scope::kBackbone, "", 200, 100),
                 other = make_token(Scope::kAdmin, "", std::nullopt, 100);
  ASSERT_TRUE(store->put_token(short_lived.record));
  ASSERT_TRUE(store->put_token(other.record));
  Authenticator auth(*store);
  EXPECT_TRUE(auth.check(short_lived.text, 199, at(0)));
  EXPECT_NE(auth.check(short_lived.text, 200, at(0)).error().message.find("expired"), std::string::npos);
  EXPECT_TRUE(auth.check(other.text, 100, at(0)));
  ASSERT_TRUE(*store->revoke_token(other.record.id, 150));
  EXPECT_NE(auth.check(other.text, 150, at(2.1)).error().message.find("revoked"), std::string::npos);
}

TEST(Tokens, TheCacheKeepsAtMostSoMany) {
  const auto store = make_memory_store();
  Authenticator auth(*store);
  std::string first;
  for (std::size_t i = 0; i <= kTokenCacheMax; ++i) {
    const NewToken made = make_token(Scope::kWorker, "", std::nullopt, 100);
    ASSERT_TRUE(store->put_token(made.record));
    ASSERT_TRUE(auth.check(made.text, 100, at(0)));
    ASSERT_EQ(auth.cached(), i == kTokenCacheMax ? 1 : i + 1) << "all are forgotten when there are too many";
    if (i == 0) first = made.text;
  }
  EXPECT_TRUE(auth.check(first, 100, at(0)));
  // Nobody is remembered for a token that does not exist.
  const std::size_t cached = auth.cached();
  for (int i = 0; i < 1000; ++i) EXPECT_FALSE(auth.check(make_token(Scope::kWorker, "", std::nullopt, 100).text, 100, at(0)));
  EXPECT_EQ(auth.cached(), cached);
}

TEST(Tokens, ScopesArePermissionsOfTheirOwn) {
  EXPECT_TRUE(permits(Scope::kAdmin, Scope::kWorker));
  EXPECT_TRUE(permits(Scope::kWorker, Scope::kWorker));
  EXPECT_FALSE(permits(Scope::kWorker, Scope::kBackbone));
  EXPECT_FALSE(permits(Scope::kBackbone, Scope::kAdmin));
}

// RFC 8032, section 7.1, test 2.
TEST(Ed25519, KnownAnswer) {
  const Bytes key = *from_hex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c");
  Bytes signature = *from_hex(
      "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aee"
      "b00d291612bb0c00");
  EXPECT_TRUE(verify_ed25519(key, "r", signature));
  EXPECT_FALSE(verify_ed25519(key, "s", signature));
  EXPECT_FALSE(verify_ed25519(ByteSpan(key).first(31), "r", signature));
  EXPECT_FALSE(verify_ed25519(key, "r", ByteSpan(signature).first(63)));
  signature[5] ^= std::byte{1};
  EXPECT_FALSE(verify_ed25519(key, "r", signature));
}

}  // namespace
}  // namespace kvasir::hub
