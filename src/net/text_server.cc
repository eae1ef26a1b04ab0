#include "net/text_server.h"

#include <poll.h>
#include <unistd.h>

#include <format>

namespace kvasir::net {
namespace {

constexpr int kTickMs = 200;
constexpr Nanos kPatience = std::chrono::seconds(3);  // for one connection in all
constexpr std::size_t kHeaderBytesMax = 8192;

bool wait_for(int fd, short events, TimePoint deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - monotonic_now()).count();
  if (left <= 0) return false;
  pollfd polled{fd, events, 0};
  return ::poll(&polled, 1, static_cast<int>(left)) > 0;
}

}  // namespace

Result<std::unique_ptr<TextServer>> TextServer::start(const HostPort& where, std::string content_type,
                                                      std::function<std::string()> text) {
  KVASIR_ASSIGN(Listener listener, listen_on(where));
  return std::unique_ptr<TextServer>(new TextServer(std::move(listener), std::move(content_type), std::move(text)));
}

TextServer::TextServer(Listener listener, std::string content_type, std::function<std::string()> text)
    : listener_(std::move(listener)),
      content_type_(std::move(content_type)),
      text_(std::move(text)),
      thread_([this] { run(); }) {}

TextServer::~TextServer() {
  stopping_ = true;
  thread_.join();
}

void TextServer::run() {
  while (!stopping_) {
    pollfd polled{listener_.fd.get(), POLLIN, 0};
    if (::poll(&polled, 1, kTickMs) <= 0) continue;
    auto accepted = accept_from(listener_);
    if (accepted && *accepted)
      answer((*accepted)->fd.get());
    else if (!accepted)
      std::this_thread::sleep_for(std::chrono::milliseconds(kTickMs));
  }
}

void TextServer::answer(int fd) const {
  const TimePoint deadline = monotonic_now() + kPatience;
  std::string request;
  while (request.find("\r\n\r\n") == std::string::npos) {
    char buffer[1024];
    if (request.size() > kHeaderBytesMax || stopping_ || !wait_for(fd, POLLIN, deadline)) return;
    const ssize_t n = ::recv(fd, buffer, sizeof buffer, 0);
    if (n <= 0) return;
    request.append(buffer, static_cast<std::size_t>(n));
  }
  const bool wanted = request.starts_with("GET /metrics ") || request.starts_with("GET /metrics?");
  const std::string body = wanted ? text_() : "there is only /metrics here.\n";
  const std::string reply =
      std::format("HTTP/1.0 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}",
                  wanted ? "200 OK" : "404 Not Found", wanted ? content_type_ : "text/plain", body.size(), body);
  for (std::size_t done = 0; done < reply.size();) {
    if (stopping_ || !wait_for(fd, POLLOUT, deadline)) return;
    const ssize_t n = ::send(fd, reply.data() + done, reply.size() - done, MSG_NOSIGNAL);
    if (n <= 0) return;
    done += static_cast<std::size_t>(n);
  }
  ::shutdown(fd, SHUT_WR);
}

}  // namespace kvasir::net
