#include "gguf/http_source.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <thread>

#include "gguf/slice.h"
#include "gguf/test_support.h"

namespace kvasir::gguf {
namespace {

using testing::HasSubstr;

// A web server for one file, on loopback, that serves ranges and misbehaves when asked to.
class RangeServer {
 public:
  explicit RangeServer(Bytes content) : content_(std::move(content)) {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    if (::bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(listener_, 8) != 0 ||
        ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0)
      throw std::runtime_error("no loopback socket");
    port_ = ntohs(address.sin_port);
    acceptor_ = std::jthread([this] { accept_all(); });
  }
  ~RangeServer() {
    stopping_ = true;
    ::shutdown(listener_, SHUT_RDWR);
    acceptor_.join();
    ::close(listener_);
  }

  std::string url(const std::string& path = "/model.gguf") const {
    return std::format("http://127.0.0.1:{}{}", port_, path);
  }
  std::string url_as(const std::string& user) const {
    return std::format("http://{}@127.0.0.1:{}/model.gguf?signature=secret", user, port_);
  }

  std::atomic<int> requests{0};
  std::atomic<int> fail_with_503{0};     // so many answers
  std::atomic<int> cut_in_the_middle{0};  // so many answers, each after half its body
  std::atomic<bool> ignores_ranges{false};
  std::atomic<int> version{1};           // the ETag
  std::atomic<std::uint64_t> body_bytes{0};

 private:
  void accept_all() {
    std::vector<std::jthread> connections;
    while (!stopping_) {
      const int fd = ::accept(listener_, nullptr, nullptr);
      if (fd < 0) continue;
      connections.emplace_back([this, fd] {
        serve(fd);
        ::close(fd);
      });
    }
  }

  static bool send_all(int fd, const void* data, std::size_t size) {
    const char* p = static_cast<const char*>(data);
    while (size > 0) {
      const ssize_t n = ::send(fd, p, size, MSG_NOSIGNAL);
      if (n <= 0) return false;
      p += n;
      size -= static_cast<std::size_t>(n);
    }
    return true;
  }
  static bool send_text(int fd, const std::string& text) { return send_all(fd, text.data(), text.size()); }

  void serve(int fd) {
    timeval patience{0, 200'000};  // so that the server can stop while a connection idles
    ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    const int on = 1;  // a head and a body are two sends
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    std::string buffer;
    while (!stopping_) {
      std::array<char, 4096> chunk;
      const ssize_t n = ::recv(fd, chunk.data(), chunk.size(), 0);
      if (n == 0) return;
      if (n < 0) continue;
      buffer.append(chunk.data(), static_cast<std::size_t>(n));
      const std::size_t end = buffer.find("\r\n\r\n");
      if (end == std::string::npos) continue;
      const std::string request = buffer.substr(0, end);
      buffer.erase(0, end + 4);
      if (!answer(fd, request)) return;
    }
  }

  bool answer(int fd, const std::string& request) {
    ++requests;
    const std::string path = request.substr(4, request.find_first_of(" ?", 4) - 4);
    if (path == "/moved")
      return send_text(fd, "HTTP/1.1 302 Found\r\nLocation: /model.gguf\r\nContent-Length: 0\r\n\r\n");
    if (path == "/to-file")
      return send_text(fd, "HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n");
    if (path == "/loop") return send_text(fd, "HTTP/1.1 302 Found\r\nLocation: /loop\r\nContent-Length: 0\r\n\r\n");
    if (path != "/model.gguf") return send_text(fd, "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone");
    if (fail_with_503 > 0) {
      --fail_with_503;
      return send_text(fd, "HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy");
    }
    std::uint64_t first = 0, last = content_.size() - 1;
    const std::size_t at = request.find("Range: bytes=");
    if (at == std::string::npos || ignores_ranges) {
      return send_text(fd, std::format("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", content_.size())) &&
             send_all(fd, content_.data(), content_.size());
    }
    const char* p = request.data() + at + 13;
    const char* end = request.data() + request.size();
    p = std::from_chars(p, end, first).ptr + 1;
    std::from_chars(p, end, last);
    const auto size = static_cast<std::size_t>(last - first + 1);
    if (!send_text(fd, std::format("HTTP/1.1 206 Partial Content\r\nETag: \"v{}\"\r\n"
                                   "Content-Range: bytes {}-{}/{}\r\nContent-Length: {}\r\n\r\n",
                                   version.load(), first, last, content_.size(), size)))
      return false;
    if (cut_in_the_middle > 0 && size > 1) {
      --cut_in_the_middle;
      body_bytes += size / 2;
      send_all(fd, content_.data() + first, size / 2);
      return false;
    }
    body_bytes += size;
    return send_all(fd, content_.data() + first, size);
  }

  Bytes content_;
  int listener_ = -1;
  std::uint16_t port_ = 0;
  std::atomic<bool> stopping_{false};
  std::jthread acceptor_;
};

constexpr HttpOptions kQuick{.attempts_max = 3, .backoff = std::chrono::milliseconds(1)};

TEST(HttpSource, SlicesAModelThatIsNeverDownloaded) {
  const TempDir dir;
  RangeServer server(read_file(real_model_path()));
  const auto local = MoeModel::open(real_model_path());
  const auto remote = MoeModel::open(server.url(), open_any_source);
  ASSERT_TRUE(remote) << message_of(remote);
  const auto cut = [&](const MoeModel& model, const std::string& path) {
    ASSERT_TRUE(write_slice(*SliceLayout::make(model, *SlicePlan::from_ranges(model, "2", "5:8")), path));
  };
  cut(*local, dir / "a.gguf");
  server.body_bytes = 0;
  cut(*remote, dir / "b.gguf");
  EXPECT_EQ(read_file(dir / "a.gguf"), read_file(dir / "b.gguf"));
  // Three experts, and the samples of the layer's id.
  EXPECT_LT(server.body_bytes, 600'000u);
}

TEST(HttpSource, ResumesBrokenTransfersAndWaitsOutBusyServers) {
  Bytes content(2'000'000);
  for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<std::byte>(i * 2654435761u >> 9);
  RangeServer server(content);
  server.fail_with_503 = 2;
  const auto source = open_http_source(server.url(), kQuick);
  ASSERT_TRUE(source) << message_of(source);
  EXPECT_EQ((*source)->size(), content.size());
  server.cut_in_the_middle = 6;  // more often than attempts_max: progress counts
  server.body_bytes = 0;
  Bytes out(1'000'000);
  const Status read = (*source)->read_at(500'000, out);
  ASSERT_TRUE(read) << message_of(read);
  EXPECT_TRUE(std::equal(out.begin(), out.end(), content.begin() + 500'000));
  EXPECT_EQ(server.body_bytes, out.size());  // no byte twice
}

TEST(HttpSource, GivesUpInOneSentence) {
  RangeServer server(Bytes(10'000));
  const auto fails = [&](const Result<SourcePtr>& source, ErrorAction action, const std::string& expected) {
    ASSERT_FALSE(source);
    EXPECT_EQ(source.error().action, action);
    EXPECT_THAT(source.error().message, HasSubstr(expected));
    expect_one_sentence(source.error().message);
  };
  fails(open_http_source(server.url("/other"), kQuick), ErrorAction::kFixInput, "status 404");
  fails(open_http_source(server.url("/to-file"), kQuick), ErrorAction::kFixInput, "cannot read");
  fails(open_http_source(server.url("/loop"), kQuick), ErrorAction::kFixInput, "redirects");
  fails(open_http_source("file:///etc/passwd", kQuick), ErrorAction::kFixInput, "not an http or https address");
  fails(open_http_source("http://127.0.0.1:1/x", kQuick), ErrorAction::kRetryLater, "try again later");
  server.fail_with_503 = 3;
  fails(open_http_source(server.url(), kQuick), ErrorAction::kRetryLater, "status 503");
  EXPECT_EQ(server.fail_with_503, 0);
  server.ignores_ranges = true;
  fails(open_http_source(server.url(), kQuick), ErrorAction::kFixInput, "serves no byte ranges");
  server.ignores_ranges = false;
  EXPECT_TRUE(open_http_source(server.url("/moved"), kQuick));
  // Secrets in the address stay out of messages.
  server.fail_with_503 = 3;
  const auto secret = open_http_source(server.url_as("me:password"), kQuick);
  ASSERT_FALSE(secret);
  EXPECT_THAT(secret.error().message, testing::Not(testing::AnyOf(HasSubstr("password"), HasSubstr("secret"))));
}

TEST(HttpSource, AFileThatChangesOnTheServerIsNoticed) {
  RangeServer server(Bytes(10'000));
  const auto source = open_http_source(server.url(), kQuick);
  ASSERT_TRUE(source);
  Bytes out(100);
  ASSERT_TRUE((*source)->read_at(5000, out));
  EXPECT_FALSE((*source)->read_at(9950, out));
  server.version = 2;
  EXPECT_THAT(message_of((*source)->read_at(5000, out)), HasSubstr("changed on the server"));
  server.ignores_ranges = true;
  EXPECT_THAT(message_of((*source)->read_at(5000, out)), HasSubstr("changed on the server"));
}

TEST(HttpSource, ThreadsReadAtTheSameTime) {
  Bytes content(400'000);
  for (std::size_t i = 0; i < content.size(); ++i) content[i] = static_cast<std::byte>(i >> 8);
  RangeServer server(content);
  const auto source = open_http_source(server.url(), kQuick);
  ASSERT_TRUE(source);
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (std::size_t t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        for (std::size_t i = 0; i < 10; ++i) {
          Bytes out(3000);
          const std::size_t at = t * 90'000 + i * 3000;
          const auto begin = content.begin() + static_cast<std::ptrdiff_t>(at);
          if (!(*source)->read_at(at, out) || !std::equal(out.begin(), out.end(), begin)) ++wrong;
        }
      });
  }
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace kvasir::gguf
