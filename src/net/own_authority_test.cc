#include "net/own_authority.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

namespace kvasir::net {
namespace {

namespace fs = std::filesystem;

std::string read(const std::string& file) {
  std::stringstream out;
  out << std::ifstream(file).rdbuf();
  return out.str();
}

class OwnAuthority : public testing::Test {
 protected:
  OwnAuthority() : folder(testing::TempDir() + testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(folder);
    fs::create_directories(folder);
  }
  // As another program sees it.
  static bool verified(const OwnCertificate& made, const std::string& how) {
    const std::string command = "openssl verify -x509_strict -purpose sslserver -CAfile " + made.authority_file + " " +
                                how + " " + made.certificate_file + " >/dev/null 2>&1";
    return std::system(command.c_str()) == 0;
  }
  const fs::path folder;
};

TEST_F(OwnAuthority, SignsForTheNamesGivenAndNoOthers) {
  const auto made = make_own_certificate(folder, {"attic", "attic.local", "192.0.2.7", "2001:db8::7"});
  ASSERT_TRUE(made) << made.error().message;
  for (const char* how : {"-verify_hostname attic", "-verify_hostname attic.local", "-verify_ip 192.0.2.7",
                          "-verify_ip 2001:db8::7"})
    EXPECT_TRUE(verified(*made, how)) << how;
  EXPECT_FALSE(verified(*made, "-verify_hostname other"));
  EXPECT_FALSE(verified(*made, "-verify_ip 192.0.2.8"));
}

TEST_F(OwnAuthority, TrustLastsWhenAddressesChange) {
  const auto before = make_own_certificate(folder, {"192.0.2.7"});
  ASSERT_TRUE(before);
  const std::string given = read(before->authority_file);
  const auto after = make_own_certificate(folder, {"192.0.2.99"});
  ASSERT_TRUE(after);
  EXPECT_EQ(read(after->authority_file), given);
  EXPECT_TRUE(verified(*after, "-verify_ip 192.0.2.99"));
}

TEST_F(OwnAuthority, KeysAreTheOwnersOnly) {
  ASSERT_TRUE(make_own_certificate(folder, {"attic"}));
  for (const char* name : {"hub-ca.key", "hub-cert.key"}) {
    struct stat status{};
    ASSERT_EQ(::stat((folder / name).c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600u) << name;
  }
  EXPECT_THAT(read(folder / "hub-ca.pem"), testing::Not(testing::HasSubstr("PRIVATE")));
}

TEST_F(OwnAuthority, NamesThatWouldBeReadAsMoreAreRefused) {
  for (const char* wrong : {"", "a,DNS:evil.example", "a b", "*"})
    EXPECT_FALSE(make_own_certificate(folder, {wrong})) << wrong;
}

TEST(OwnNames, AreThisMachines) {
  EXPECT_THAT(own_names(), testing::Contains("localhost"));
  EXPECT_THAT(own_names(), testing::Contains("127.0.0.1"));
}

}  // namespace
}  // namespace kvasir::net
