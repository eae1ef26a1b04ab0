#include "net/connect.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include "net/stream.h"

namespace kvasir::net {
namespace {

using std::chrono::seconds;

std::optional<Accepted> accept_soon(const Listener& listener) {
  for (int i = 0; i < 1000; ++i) {
    auto accepted = accept_from(listener);
    if (!accepted || *accepted) return *std::move(accepted);
    ::usleep(1000);
  }
  return std::nullopt;
}

TEST(HostPort, Forms) {
  EXPECT_EQ(*parse_host_port("a.example:80"), (HostPort{"a.example", 80}));
  EXPECT_EQ(*parse_host_port("[::1]:9000"), (HostPort{"::1", 9000}));
  EXPECT_EQ(*parse_host_port("9000", "127.0.0.1"), (HostPort{"127.0.0.1", 9000}));
  EXPECT_EQ(*parse_host_port(":9000", "127.0.0.1"), (HostPort{"127.0.0.1", 9000}));
  EXPECT_EQ(format_host_port({"::1", 9000}), "[::1]:9000");
  EXPECT_EQ(format_host_port({"h", 1}), "h:1");
  for (const char* text :
       {"", "9000", ":9000", "h:", "h:x", "h:65536", "h:-1", "::1:80", "[::1]", "[::1]80", "[]:80", "h:80 "})
    EXPECT_FALSE(parse_host_port(text)) << text;
}

TEST(Connect, LoopbackBothFamilies) {
  for (const char* host : {"127.0.0.1", "::1"}) {
    auto listener = listen_on({host, 0});
    if (!listener && std::string_view(host) == "::1") continue;  // a machine without IPv6
    ASSERT_TRUE(listener) << listener.error().message;
    ASSERT_NE(listener->port, 0);
    EXPECT_FALSE(accept_from(*listener)->has_value());
    auto client = connect_to({host, listener->port}, seconds(5));
    ASSERT_TRUE(client) << client.error().message;
    auto server = accept_soon(*listener);
    ASSERT_TRUE(server);
    for (int fd : {client->get(), server->fd.get()}) {
      EXPECT_NE(::fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
      EXPECT_NE(::fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
      int value = 0;
      socklen_t length = sizeof value;
      ASSERT_EQ(::getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &value, &length), 0);
      EXPECT_EQ(value, 1);
      char congestion[16] = {};  // whatever this machine's default is
      length = sizeof congestion;
      ASSERT_EQ(::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, congestion, &length), 0);
      EXPECT_STREQ(congestion, "reno");
    }
    EXPECT_TRUE(server->peer.starts_with(std::string_view(host).contains(':') ? "[::1]:" : "127.0.0.1:"))
        << server->peer;

    auto a = make_plain_stream(*std::move(client));
    auto b = make_plain_stream(std::move(server->fd));
    std::byte out[3] = {std::byte{1}, std::byte{2}, std::byte{3}};
    const iovec parts[] = {{out, 1}, {out + 1, 0}, {out + 1, 2}};
    EXPECT_EQ(a->write_some(parts)->bytes, 3u);
    ASSERT_TRUE(*wait_ready(*b, 5000));
    std::byte in[8];
    EXPECT_EQ(b->read_some(in)->bytes, 3u);
  }
}

TEST(Connect, PortInUseIsOneClearSentence) {
  auto first = listen_on({"127.0.0.1", 0});
  ASSERT_TRUE(first);
  auto second = listen_on({"127.0.0.1", first->port});
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().action, ErrorAction::kFixInput);
  EXPECT_EQ(second.error().message,
            "port " + std::to_string(first->port) +
                " of 127.0.0.1 is in use; stop the program that holds it or choose another port (0 picks a free one).");
}

TEST(Connect, OwnAddressCanBeListenedOn) {
  const std::optional<std::string> own = own_address();
  if (!own) GTEST_SKIP() << "no default route here";
  EXPECT_TRUE(listen_on({*own, 0})) << *own;
}

TEST(Connect, ForeignAddressIsRefusedInWords) {
  auto listener = listen_on({"192.0.2.1", 0});  // a documentation address
  ASSERT_FALSE(listener);
  EXPECT_NE(listener.error().message.find("no address 192.0.2.1"), std::string::npos);
}

TEST(Connect, RefusedAndLate) {
  std::uint16_t closed_port = 0;
  {
    auto listener = listen_on({"127.0.0.1", 0});
    ASSERT_TRUE(listener);
    closed_port = listener->port;
  }
  auto refused = connect_to({"127.0.0.1", closed_port}, seconds(5));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().action, ErrorAction::kRetryElsewhere);
  EXPECT_NE(refused.error().message.find("127.0.0.1:" + std::to_string(closed_port)), std::string::npos);

  // The second address is tried when the first refuses.
  auto listener = listen_on({"127.0.0.1", 0});
  auto addresses = resolve({"127.0.0.1", closed_port});
  addresses->push_back(resolve({"127.0.0.1", listener->port})->front());
  EXPECT_TRUE(connect_any(*addresses, seconds(5)));
  EXPECT_FALSE(connect_any({}, seconds(1)));
}

// A listener whose queue is full lets a connection hang: the deadline must end it.
TEST(Connect, DeadlineHolds) {
  auto listener = listen_on({"127.0.0.1", 0});
  ASSERT_TRUE(listener);
  ASSERT_EQ(::listen(listener->fd.get(), 0), 0);
  std::vector<Fd> held;
  bool timed_out = false;
  for (int i = 0; i < 8 && !timed_out; ++i) {
    const TimePoint begin = monotonic_now();
    auto fd = connect_to({"127.0.0.1", listener->port}, std::chrono::milliseconds(100));
    if (fd) {
      held.push_back(*std::move(fd));
      continue;
    }
    timed_out = true;
    EXPECT_GE(monotonic_now() - begin, std::chrono::milliseconds(99));
    EXPECT_LT(monotonic_now() - begin, seconds(5));
    EXPECT_NE(fd.error().message.find("timed out"), std::string::npos) << fd.error().message;
  }
  EXPECT_TRUE(timed_out);
}

}  // namespace
}  // namespace kvasir::net
