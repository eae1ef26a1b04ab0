// The dialing end against a peer that is a socket of the test.
#include "net/websocket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

namespace kvasir::net {
namespace {

using ::testing::HasSubstr;

// Boost's parser takes an end before the first byte for a fault of the program, and ends it.
TEST(WebSocketDial, APeerThatHangsUpUnheardIsAnError) {
  const auto dialer = RelayDialer::create({.url = "http://127.0.0.1:1", .token = "kvasir_t", .ca_file = {}});
  ASSERT_TRUE(dialer);
  int fds[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
  Fd peer(fds[1]);
  const auto stream = dialer->open(Fd(fds[0]), "laptop-1a2b");
  ASSERT_TRUE(stream);
  EXPECT_TRUE((*stream)->is_open());  // no error yet
  char request[4096];
  EXPECT_GT(::recv(peer.get(), request, sizeof request, MSG_DONTWAIT), 0);
  peer = Fd();
  const auto open = (*stream)->is_open();
  ASSERT_FALSE(open);
  EXPECT_THAT(open.error().message, HasSubstr("it closed it."));
}

}  // namespace
}  // namespace kvasir::net
