#include "net/text_server.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

namespace kvasir::net {
namespace {

std::string ask(std::uint16_t port, std::string_view request) {
  auto fd = connect_to({"127.0.0.1", port}, std::chrono::seconds(5));
  EXPECT_TRUE(fd) << fd.error().message;
  EXPECT_EQ(::send(fd->get(), request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
  std::string out;
  char buffer[4096];
  pollfd polled{fd->get(), POLLIN, 0};
  while (::poll(&polled, 1, 10'000) > 0) {
    const ssize_t n = ::recv(fd->get(), buffer, sizeof buffer, 0);
    if (n <= 0) break;
    out.append(buffer, static_cast<std::size_t>(n));
  }
  return out;
}

TEST(TextServer, AnswersScrapersOnly) {
  int n = 0;
  const auto server =
      TextServer::start({"127.0.0.1", 0}, "text/x", [&n] { return std::to_string(++n) + std::string(300'000, 'x'); });
  ASSERT_TRUE(server) << server.error().message;
  const std::uint16_t port = (*server)->port();
  const std::string first = ask(port, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_TRUE(first.starts_with("HTTP/1.0 200 OK\r\nContent-Type: text/x\r\nContent-Length: 300001\r\n"));
  EXPECT_TRUE(first.ends_with("x"));
  EXPECT_EQ(first.size() - first.find("\r\n\r\n") - 4, 300'001u);
  EXPECT_TRUE(ask(port, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.0 404"));
  EXPECT_TRUE(ask(port, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.0 404"));
  // One that says nothing, or says too much, does not keep the others out for long.
  const auto silent = connect_to({"127.0.0.1", port}, std::chrono::seconds(5));
  ASSERT_TRUE(silent);
  EXPECT_EQ(ask(port, std::string(100'000, 'a')), "");
  EXPECT_TRUE(ask(port, "GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.0 200"));
  EXPECT_EQ(n, 2);
}

}  // namespace
}  // namespace kvasir::net
