#include "net/certificate_name.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <format>

namespace kvasir::net {
namespace {

// The names of a certificate made by openssl with these alternative names.
std::string name_of(const std::string& names) {
  const auto folder = std::filesystem::path(testing::TempDir());
  const std::string file = folder / std::format("name-{}.pem", std::hash<std::string>{}(names));
  const std::string command = std::format(
      "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=other {} -keyout {}.key -out {} 2>&1",
      names.empty() ? "" : "-addext subjectAltName=" + names, file, file);
  EXPECT_EQ(std::system((command + " >/dev/null").c_str()), 0);
  return certificate_name(file);
}

TEST(CertificateName, AnAddressOnlyWhereThereIsNoName) {
  EXPECT_EQ(name_of("DNS:hub.example,IP:192.0.2.1"), "hub.example");
  EXPECT_EQ(name_of("IP:192.0.2.1,DNS:hub.example"), "hub.example");
  EXPECT_EQ(name_of("DNS:*.example,IP:192.0.2.1"), "192.0.2.1");
  EXPECT_EQ(name_of("IP:2001:db8::7"), "2001:db8::7");
  EXPECT_EQ(name_of(""), "");
  EXPECT_EQ(certificate_name("/nowhere"), "");
}

}  // namespace
}  // namespace kvasir::net
