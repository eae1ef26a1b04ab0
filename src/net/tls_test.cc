#include "net/tls.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <thread>

#include "net/connect.h"
#include "net/stream_pair.h"

namespace kvasir::net {
namespace {

namespace fs = std::filesystem;

class TempDir {
 public:
  TempDir() {
    std::string name = (fs::temp_directory_path() / "kvasir-tls-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~TempDir() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

TEST(Fingerprints, TextForm) {
  const std::string text = format_fingerprint(test_identity().fingerprint);
  EXPECT_EQ(text.size(), 64u);
  EXPECT_EQ(*parse_fingerprint(text), test_identity().fingerprint);
  EXPECT_FALSE(parse_fingerprint(""));
  EXPECT_FALSE(parse_fingerprint(text + "00"));
  EXPECT_FALSE(parse_fingerprint(std::string(64, 'x')));
}

TEST(TlsIdentity, MadeOnceAndPrivate) {
  const TempDir dir;
  const fs::path data = dir.path() / "a" / "b";
  const auto first = load_or_make_tls_identity(data);
  ASSERT_TRUE(first) << first.error().message;
  const fs::path file = data / kTlsIdentityFile;
  struct stat info {};
  ASSERT_EQ(::stat(file.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  ASSERT_EQ(::stat(data.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  EXPECT_EQ(load_or_make_tls_identity(data)->fingerprint, first->fingerprint);
  EXPECT_EQ(std::distance(fs::directory_iterator(data), fs::directory_iterator()), 1);  // no temporary left

  ASSERT_EQ(::chmod(file.c_str(), 0644), 0);
  const auto exposed = load_or_make_tls_identity(data);
  ASSERT_FALSE(exposed);
  EXPECT_NE(exposed.error().message.find("chmod 600"), std::string::npos);
  ASSERT_EQ(::chmod(file.c_str(), 0600), 0);
  std::ofstream(file) << "-----BEGIN PRIVATE KEY-----\nnonsense\n";
  EXPECT_FALSE(load_or_make_tls_identity(data));
}

TEST(TlsIdentity, RacingStartsAgree) {
  const TempDir dir;
  Fingerprint seen[4];
  {
    std::vector<std::jthread> threads;
    for (Fingerprint& out : seen)
      threads.emplace_back([&] { out = load_or_make_tls_identity(dir.path() / "x")->fingerprint; });
  }
  for (const Fingerprint& out : seen) EXPECT_EQ(out, seen[0]);
}

// Drives both ends until one fails; gives the client's error.
Result<void> handshake(Stream& client, Stream& server) {
  std::byte scratch[16];
  for (int i = 0; i < 20; ++i) {
    KVASIR_TRY(client.read_some(scratch));
    if (auto got = server.read_some(scratch); !got) return std::unexpected(got.error());
  }
  return {};
}

TEST(Tls, AnotherCertificateIsRefusedBeforeAnyByteLeaves) {
  auto [a, b] = socket_pair();
  Fingerprint other = test_identity().fingerprint;
  other[31] ^= std::byte{1};
  auto client = *make_tls_client_stream(std::move(a), *TlsContext::client(), other);
  auto server = *make_tls_server_stream(std::move(b), *TlsContext::server(test_identity()));
  const Bytes secret = pattern(1000);
  const iovec part{const_cast<std::byte*>(secret.data()), secret.size()};
  bool refused = false;
  for (int i = 0; i < 20 && !refused; ++i) {
    const auto sent = client->write_some({&part, 1});
    if (!sent) {
      refused = true;
      EXPECT_NE(sent.error().message.find(format_fingerprint(test_identity().fingerprint)), std::string::npos);
      EXPECT_NE(sent.error().message.find(format_fingerprint(other)), std::string::npos);
      break;
    }
    ASSERT_EQ(sent->state, IoState::kWouldBlock);
    std::byte scratch[16];
    ASSERT_TRUE(server->read_some(scratch));
  }
  EXPECT_TRUE(refused);
  std::byte scratch[16];
  EXPECT_FALSE(server->read_some(scratch));  // hears the alert
}

TEST(Tls, PlainPeersAreRefused) {
  {
    auto [a, b] = socket_pair();
    auto server = *make_tls_server_stream(std::move(a), *TlsContext::server(test_identity()));
    auto plain = make_plain_stream(std::move(b));
    const Bytes hello = pattern(64);
    const iovec part{const_cast<std::byte*>(hello.data()), hello.size()};
    ASSERT_TRUE(plain->write_some({&part, 1}));
    std::byte scratch[16];
    EXPECT_FALSE(server->read_some(scratch));
  }
  {
    auto [a, b] = socket_pair();
    auto client = *make_tls_client_stream(std::move(a), *TlsContext::client(), test_identity().fingerprint);
    auto plain = make_plain_stream(std::move(b));
    std::byte scratch[16];
    EXPECT_EQ(client->read_some(scratch)->state, IoState::kWouldBlock);
    const Bytes hello = pattern(64);
    const iovec part{const_cast<std::byte*>(hello.data()), hello.size()};
    ASSERT_TRUE(plain->write_some({&part, 1}));
    EXPECT_FALSE(client->read_some(scratch));
  }
}

TEST(Tls, NothingReadableCrosses) {
  auto [a, b] = socket_pair(1 << 20);
  auto client = *make_tls_client_stream(std::move(a), *TlsContext::client(), test_identity().fingerprint);
  auto [c, d] = socket_pair(1 << 20);
  auto server = *make_tls_server_stream(std::move(c), *TlsContext::server(test_identity()));
  // Between them: copies bytes and keeps them.
  Bytes seen;
  const auto ferry = [&](const Fd& from, const Fd& to) {
    std::byte buffer[65536];
    while (true) {
      const ssize_t n = ::recv(from.get(), buffer, sizeof buffer, 0);
      if (n <= 0) return;
      seen.insert(seen.end(), buffer, buffer + n);
      ASSERT_EQ(::send(to.get(), buffer, static_cast<std::size_t>(n), 0), n);
    }
  };
  const std::string secret = "the rows of a private conversation";
  const iovec part{const_cast<char*>(secret.data()), secret.size()};
  std::string got;
  bool sent = false;
  for (int i = 0; i < 20 && got.size() < secret.size(); ++i) {
    if (!sent) sent = client->write_some({&part, 1})->state == IoState::kDone;
    ferry(b, d);
    std::byte buffer[100];
    const IoResult read = *server->read_some(buffer);
    got.append(reinterpret_cast<const char*>(buffer), read.bytes);
    ferry(d, b);
  }
  EXPECT_EQ(got, secret);
  EXPECT_TRUE(std::ranges::search(seen, std::as_bytes(std::span(secret))).empty());
  EXPECT_TRUE(client->encrypted());
}

TEST(Tls, OverLoopbackTcp) {
  auto listener = listen_on({"127.0.0.1", 0});
  ASSERT_TRUE(listener);
  auto fd = connect_to({"127.0.0.1", listener->port}, std::chrono::seconds(5));
  ASSERT_TRUE(fd);
  std::optional<Accepted> accepted;
  for (int i = 0; i < 1000 && !accepted; ++i, ::usleep(1000)) accepted = *accept_from(*listener);
  ASSERT_TRUE(accepted);
  auto client = *make_tls_client_stream(*std::move(fd), *TlsContext::client(), test_identity().fingerprint);
  auto server = *make_tls_server_stream(std::move(accepted->fd), *TlsContext::server(test_identity()));
  // 8 MiB each way at once, each side blocked on its own writes now and then.
  const Bytes data = pattern(8 << 20);
  struct End {
    Stream& stream;
    std::size_t sent = 0;
    Bytes got;
  } ends[] = {{*client, 0, {}}, {*server, 0, {}}};
  std::vector<std::byte> buffer(200'000);
  const TimePoint deadline = monotonic_now() + std::chrono::seconds(15);
  while ((ends[0].got.size() < data.size() || ends[1].got.size() < data.size()) && monotonic_now() < deadline) {
    for (End& end : ends) {
      if (end.sent < data.size()) {
        const iovec part{const_cast<std::byte*>(data.data() + end.sent), data.size() - end.sent};
        end.sent += end.stream.write_some({&part, 1})->bytes;
      } else {
        ASSERT_TRUE(end.stream.write_some({}));
      }
      const IoResult read = *end.stream.read_some(buffer);
      end.got.insert(end.got.end(), buffer.begin(), buffer.begin() + static_cast<std::ptrdiff_t>(read.bytes));
    }
  }
  EXPECT_EQ(ends[0].got, data);
  EXPECT_EQ(ends[1].got, data);
}

TEST(Tls, HandshakeSurvivesATinySocketBuffer) {
  auto [a, b] = socket_pair(1);  // the kernel's minimum
  auto client = *make_tls_client_stream(std::move(a), *TlsContext::client(), test_identity().fingerprint);
  auto server = *make_tls_server_stream(std::move(b), *TlsContext::server(test_identity()));
  EXPECT_TRUE(handshake(*client, *server));
}

}  // namespace
}  // namespace kvasir::net
