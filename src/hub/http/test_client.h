// For tests: a blocking HTTP client that can also send what no honest client would.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <charconv>
#include <cstring>
#include <format>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kvasir::hub {

struct Reply {
  int status = 0;  // 0: the connection ended without one
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;
  bool complete = false;  // the whole length that was promised came
  nlohmann::json json() const { return nlohmann::json::parse(body, nullptr, false); }
  std::string error() const {
    const auto value = json();
    return value.is_object() && value.contains("error") && value["error"].is_string()
               ? value["error"].get<std::string>()
               : "";
  }
};

class TestClient {
 public:
  explicit TestClient(std::uint16_t port) : port_(port) { connect(); }
  ~TestClient() { disconnect(); }
  TestClient(const TestClient&) = delete;
  TestClient& operator=(const TestClient&) = delete;

  void connect() {
    disconnect();
    fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(port_);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
    const timeval limit{10, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    rest_.clear();
  }
  void disconnect() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(n));
    }
    return true;
  }

  static std::string request(std::string_view method, std::string_view target, std::string_view token,
                             std::string_view body = {}, std::string_view extra = {}) {
    std::string out = std::format("{} {} HTTP/1.1\r\nHost: hub\r\n{}", method, target, extra);
    if (!token.empty()) out += std::format("Authorization: Bearer {}\r\n", token);
    if (!body.empty() || method == "POST") out += std::format("Content-Length: {}\r\n", body.size());
    return out + "\r\n" + std::string(body);
  }

  // Reads one answer; of a HEAD request only its header.
  Reply receive(bool head = false) {
    Reply out = receive_header();
    if (out.status == 0) return out;
    if (out.status == 100) return receive(head);
    const auto length = out.headers.find("content-length");
    const std::size_t wanted =
        head || out.status == 304 || length == out.headers.end() ? 0 : std::stoull(length->second);
    while (rest_.size() < wanted && read_more()) {
    }
    out.complete = rest_.size() >= wanted;
    out.body = rest_.substr(0, wanted);
    rest_.erase(0, wanted);
    return out;
  }

  // What follows of a stream; empty at its end.
  std::string receive_chunk() {
    std::size_t end;
    while ((end = rest_.find("\r\n")) == std::string::npos)
      if (!read_more()) return {};
    const std::size_t size = std::stoull(rest_.substr(0, end), nullptr, 16);
    while (rest_.size() < end + size + 4)
      if (!read_more()) return {};
    std::string out = rest_.substr(end + 2, size);
    rest_.erase(0, end + size + 4);
    return out;
  }

  Reply receive_header() {
    Reply out;
    std::size_t end;
    while ((end = rest_.find("\r\n\r\n")) == std::string::npos)
      if (!read_more()) return out;
    const std::string header = rest_.substr(0, end);
    rest_.erase(0, end + 4);
    if (header.size() < 12) return out;
    std::from_chars(header.data() + 9, header.data() + 12, out.status);
    for (std::size_t at = header.find("\r\n"); at != std::string::npos; at = header.find("\r\n", at + 2)) {
      const std::string line = header.substr(at + 2, header.find("\r\n", at + 2) - at - 2);
      const std::size_t colon = line.find(": ");
      if (colon == std::string::npos) continue;
      std::string name = line.substr(0, colon);
      for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      out.headers[name] = line.substr(colon + 2);
    }
    return out;
  }

  Reply get(std::string_view target, std::string_view token, std::string_view extra = {}) {
    send(request("GET", target, token, {}, extra));
    return receive();
  }
  Reply post(std::string_view target, std::string_view token, const nlohmann::json& body) {
    send(request("POST", target, token, body.dump()));
    return receive();
  }

 private:
  bool read_more() {
    char buffer[65536];
    const ssize_t n = ::recv(fd_, buffer, sizeof buffer, 0);
    if (n <= 0) return false;
    rest_.append(buffer, static_cast<std::size_t>(n));
    return true;
  }

  std::uint16_t port_;
  int fd_ = -1;
  std::string rest_;
};

}  // namespace kvasir::hub
