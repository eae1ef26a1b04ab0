// Session grants at a worker's door, over real TLS: who is let in, and what a copied grant is worth.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/testing.h"

namespace kvasir::worker {
namespace {

using testing::TempDir;
using testing::TestClient;
using testing::TestServer;
using ::testing::HasSubstr;
using wire::ErrorCode;
using wire::FrameType;

constexpr std::string_view kTicket = "the ticket";

class Grants : public ::testing::Test {
 protected:
  Grants() {
    testing::make_model(dir_ / "model.gguf", {});
    ServerOptions options;
    options.tls = net::TlsContext::server(identity_).value();
    options.token = kTicket;
    options.grants = GrantCheck{.hub = hub_.public_key(), .worker_id = "laptop"};
    server_ = std::make_unique<TestServer>(std::vector{dir_ / "model.gguf"}, options);
  }

  std::string grant(std::string_view worker = "laptop", std::int64_t for_s = 600) const {
    const auto now = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch());
    return net::sign_grant({.backbone = "b",
                            .worker = std::string(worker),
                            .model = "m",
                            .expires_unix_s = static_cast<std::uint64_t>(now.count() + for_s),
                            .backbone_key = key_.public_key()},
                           hub_)
        .value();
  }
  TestClient client() { return TestClient(server_->port(), &context_, &identity_.fingerprint); }
  static net::Binding binding(TestClient& client) {
    // The handshake runs inside reads and writes.
    while (true) {
      EXPECT_TRUE(client.stream().write_some({}));
      if (const auto state = net::tls_state(client.stream())) return state->binding;
      EXPECT_TRUE(net::wait_ready(client.stream(), 1000));
    }
  }
  // Empty: let in.
  std::string show(TestClient& client, const std::string& token) {
    wire::Hello hello = testing::backbone_hello();
    hello.token = token;
    client.send(FrameType::kHello, 0, hello);
    const auto header = client.next();
    if (header && header->type == FrameType::kHello) return {};
    EXPECT_TRUE(header && header->type == FrameType::kError);
    const auto error = wire::decode_error(client.payload());
    EXPECT_EQ(error->code, ErrorCode::kUnauthorized);
    return error->message;
  }

  TempDir dir_;
  const net::TlsIdentity identity_ = net::make_tls_identity().value();
  const net::TlsContext context_ = net::TlsContext::client().value();
  const net::SigningKey hub_ = net::SigningKey::make().value(), key_ = net::SigningKey::make().value();
  std::unique_ptr<TestServer> server_;
};

TEST_F(Grants, OpenTheDoorBesideTheTicket) {
  TestClient granted = client();
  EXPECT_EQ(show(granted, net::prove_grant(grant(), key_, binding(granted))), "");
  TestClient ticketed = client();
  EXPECT_EQ(show(ticketed, std::string(kTicket)), "");
  TestClient stranger = client();
  EXPECT_THAT(show(stranger, "another ticket"), HasSubstr("not it"));
}

TEST_F(Grants, AReplayIsRefused) {
  TestClient first = client();
  const std::string token = net::prove_grant(grant(), key_, binding(first));
  EXPECT_EQ(show(first, token), "");
  TestClient second = client();  // takes the TLS session up again, and is another connection all the same
  binding(second);
  EXPECT_THAT(show(second, token), HasSubstr("another connection"));
}

TEST_F(Grants, ForOthersOrTooOldAreRefused) {
  TestClient other = client();
  EXPECT_THAT(show(other, net::prove_grant(grant("desktop"), key_, binding(other))), HasSubstr("another worker"));
  TestClient old = client();
  EXPECT_THAT(show(old, net::prove_grant(grant("laptop", -1000), key_, binding(old))), HasSubstr("expired"));
  TestClient stolen = client();
  EXPECT_THAT(show(stolen, net::prove_grant(grant(), net::SigningKey::make().value(), binding(stolen))),
              HasSubstr("somebody else"));
  TestClient bare = client();
  EXPECT_THAT(show(bare, grant()), HasSubstr("malformed"));
}

// A grant is bound to TLS: on a plain connection it proves nothing.
TEST_F(Grants, NotInTheClear) {
  ServerOptions options;
  options.token = kTicket;
  options.grants = GrantCheck{.hub = hub_.public_key(), .worker_id = "laptop"};
  TestServer plain({dir_ / "model.gguf"}, options);
  TestClient client(plain.port());
  EXPECT_THAT(show(client, net::prove_grant(grant(), key_, {})), HasSubstr("TLS only"));
}

}  // namespace
}  // namespace kvasir::worker
