// Slices over a real socket: whole, in ranges, resumed, and of a model that changes meanwhile.

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "gguf/backbone.h"
#include "gguf/slice.h"
#include "hub/http/test_hub.h"

namespace kvasir::hub {
namespace {

constexpr std::string_view kShard = "/api/proxy/models/m/expert-shard?layers=0:2&experts=1:4,6";

class Download : public testing::Test {
 protected:
  void SetUp() override {
    hub_.wait_ready();
    const auto model = *gguf::MoeModel::open((hub_.top / "models" / "m.gguf").string());
    const std::string path = (hub_.top / "expected.gguf").string();
    ASSERT_TRUE(
        gguf::write_slice(*gguf::SliceLayout::make(model, *gguf::SlicePlan::from_ranges(model, "0:2", "1:4,6")), path));
    std::ifstream in(path, std::ios::binary);
    expected_.assign(std::istreambuf_iterator<char>(in), {});
  }
  Reply get(std::string_view extra = {}) { return client_.get(kShard, hub_.worker, extra); }

  TestHub hub_;
  TestClient client_{hub_.server->port()};
  std::string expected_;
};

TEST_F(Download, TheWholeSliceIsTheSlicersFile) {
  const Reply reply = get();
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.headers.at("content-length"), std::to_string(expected_.size()));
  EXPECT_EQ(reply.headers.at("accept-ranges"), "bytes");
  EXPECT_TRUE(reply.body == expected_);
  client_.send(TestClient::request("HEAD", kShard, hub_.worker));
  const Reply head = client_.receive(true);
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.headers.at("content-length"), std::to_string(expected_.size()));
  EXPECT_EQ(head.headers.at("etag"), reply.headers.at("etag"));
  const Reply older = client_.get("/api/proxy/models/m/expert-shard?layer=1&expert_begin=2&expert_end=5", hub_.worker);
  EXPECT_EQ(older.status, 200);
  EXPECT_TRUE(older.body.starts_with("GGUF"));
  EXPECT_EQ(get("If-None-Match: " + reply.headers.at("etag") + "\r\n").status, 304);
}

TEST_F(Download, TheBackboneFileIsTheSlicersToo) {
  const auto model = *gguf::MoeModel::open((hub_.top / "models" / "m.gguf").string());
  const std::string path = (hub_.top / "backbone.gguf").string();
  ASSERT_TRUE(gguf::write_backbone(model, path));
  std::ifstream in(path, std::ios::binary);
  const std::string expected(std::istreambuf_iterator<char>(in), {});
  constexpr std::string_view kBackbone = "/api/proxy/models/m/backbone";
  const Reply whole = client_.get(kBackbone, hub_.backbone);
  EXPECT_EQ(whole.status, 200);
  EXPECT_TRUE(whole.body == expected);
  // Only what is not zero, put into a file of zeros.
  const auto extents = client_.get(std::string(kBackbone) + "?extents=1", hub_.backbone).json();
  EXPECT_EQ(extents["size"], expected.size());
  EXPECT_EQ(extents["etag"], whole.headers.at("etag"));
  std::string sparse(expected.size(), '\0');
  std::size_t fetched = 0;
  for (const auto& range : extents["extents"]) {
    const std::size_t begin = range[0], end = range[1];
    const Reply part = client_.get(kBackbone, hub_.backbone, std::format("Range: bytes={}-{}\r\n", begin, end - 1));
    ASSERT_EQ(part.body.size(), end - begin);
    sparse.replace(begin, end - begin, part.body);
    fetched += end - begin;
  }
  EXPECT_TRUE(sparse == expected);
  EXPECT_LT(fetched, expected.size());
  EXPECT_EQ(client_.get(kBackbone, hub_.worker).status, 403);
}

TEST_F(Download, RangesSingleAndMultiple) {
  const std::size_t size = expected_.size();
  for (const auto& [begin, end] :
       {std::pair<std::size_t, std::size_t>{0, 1}, {5, 5000}, {size - 7, size}, {size / 3, size / 2}}) {
    const Reply reply = get(std::format("Range: bytes={}-{}\r\n", begin, end - 1));
    EXPECT_EQ(reply.status, 206);
    EXPECT_EQ(reply.headers.at("content-range"), std::format("bytes {}-{}/{}", begin, end - 1, size));
    EXPECT_TRUE(reply.body == expected_.substr(begin, end - begin));
  }
  EXPECT_TRUE(get("Range: bytes=-10\r\n").body == expected_.substr(size - 10));
  const Reply both = get(std::format("Range: bytes=10-19,{}-{}\r\n", size - 5, size - 1));
  EXPECT_EQ(both.status, 206);
  ASSERT_TRUE(both.complete);
  const std::string type = both.headers.at("content-type");
  ASSERT_TRUE(type.starts_with("multipart/byteranges; boundary="));
  const std::string boundary = type.substr(type.find('=') + 1);
  const auto part = [&](std::size_t begin, std::size_t end) {
    return std::format("\r\n--{}\r\nContent-Type: application/octet-stream\r\nContent-Range: bytes {}-{}/{}\r\n\r\n",
                       boundary, begin, end - 1, size) +
           expected_.substr(begin, end - begin);
  };
  EXPECT_TRUE(both.body == part(10, 20) + part(size - 5, size) + "\r\n--" + boundary + "--\r\n");
}

TEST_F(Download, ResumesOnlyTheSameContent) {
  const std::string etag = get("Range: bytes=0-0\r\n").headers.at("etag");
  EXPECT_EQ(get("Range: bytes=100-\r\nIf-Range: " + etag + "\r\n").status, 206);
  const Reply other = get("Range: bytes=100-\r\nIf-Range: \"something else\"\r\n");
  EXPECT_EQ(other.status, 200);
  EXPECT_EQ(other.body.size(), expected_.size());
  // The model is replaced: the old tag gets the new whole, not a mixture.
  const auto before = hub_.hub->catalogue().find("m");
  hub_.write_model("m", 2);
  hub_.hub->catalogue().rescan_soon();
  for (int i = 0; i < 1000 && (hub_.hub->catalogue().find("m") == before || !hub_.hub->catalogue().find("m")->ready());
       ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  const Reply fresh = get("Range: bytes=100-\r\nIf-Range: " + etag + "\r\n");
  EXPECT_EQ(fresh.status, 200);
  EXPECT_NE(fresh.headers.at("etag"), etag);
  EXPECT_FALSE(fresh.body == expected_);
}

TEST_F(Download, AFileOverwrittenInPlaceIsSaidAndReadAnew) {
  Reply first = client_.get(kShard, hub_.worker, "Range: bytes=0-9\r\n");
  ASSERT_EQ(first.status, 206);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  {
    std::fstream file(hub_.top / "models" / "m.gguf", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-10, std::ios::end);
    file.put('x');
  }
  Reply next = client_.get(kShard, hub_.worker);
  if (next.status == 503) {
    EXPECT_NE(next.error().find("changed while in use"), std::string::npos);
    EXPECT_EQ(next.headers.at("retry-after"), "2");
  } else {
    EXPECT_EQ(next.status, 200);  // read anew already
    EXPECT_NE(next.headers.at("etag"), first.headers.at("etag"));
  }
  int status = 0;
  for (int i = 0; i < 500 && status != 200; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    status = client_.get(kShard, hub_.worker, "Range: bytes=0-9\r\n").status == 206 ? 200 : 0;
  }
  EXPECT_EQ(status, 200);
}

// Larger than what the two sockets buffer, so that the hub is in the middle when it happens.
TEST(DownloadUnderWay, IsCutWhenTheFileChanges) {
  TestHub hub;
  gguf::SynthOptions synth;
  synth.n_expert = 64;
  synth.n_embd = 512;
  synth.n_ff = 512;
  synth.sparse = true;
  const std::string path = (hub.top / "models" / "m.gguf").string();
  ASSERT_TRUE(gguf::write_synthetic(synth, path + ".new"));
  std::filesystem::rename(path + ".new", path);
  const auto before = hub.hub->catalogue().find("m");
  hub.hub->catalogue().rescan_soon();
  for (int i = 0; i < 1000 && hub.hub->catalogue().find("m") == before; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  hub.wait_ready();
  TestClient client = hub.client();
  client.send(TestClient::request("GET", "/api/proxy/models/m/expert-shard?layers=:&experts=:", hub.worker));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-10, std::ios::end);
    file.put('x');
  }
  const Reply cut = client.receive();
  EXPECT_EQ(cut.status, 200);
  EXPECT_FALSE(cut.complete);
  EXPECT_NE(hub.log_text().find("changed while in use"), std::string::npos);
}

TEST_F(Download, ManyAtOnceAreAllRight) {
  std::atomic<int> wrong = 0;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 8; ++t)
      threads.emplace_back([&] {
        TestClient client(hub_.server->port());
        for (int i = 0; i < 5; ++i)
          if (client.get(kShard, hub_.worker).body != expected_) ++wrong;
      });
  }
  EXPECT_EQ(wrong, 0);
}

TEST(Tls, ServesHttpsAndNoPlainHttpElsewhere) {
  char folder[] = "/tmp/kvasir-tls-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const std::string top = folder;
  ASSERT_EQ(
      std::system(
          ("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
           "-addext subjectAltName=IP:127.0.0.1 -keyout " +
           top + "/key.pem -out " + top + "/cert.pem 2>/dev/null")
              .c_str()),
      0);
  TestHub::Options options;
  options.server.certificate_file = top + "/cert.pem";
  options.server.key_file = top + "/key.pem";
  {
    TestHub hub(options);
    hub.wait_ready();
    const std::string url = std::format("https://127.0.0.1:{}", hub.server->port());
    const std::string curl = "curl -sS --cacert " + top + "/cert.pem -H 'Authorization: Bearer " + hub.worker + "' ";
    ASSERT_EQ(std::system((curl + "-o " + top + "/slice.gguf '" + url + std::string(kShard) + "'").c_str()), 0);
    EXPECT_TRUE(gguf::MoeModel::open(top + "/slice.gguf"));
    ASSERT_EQ(std::system((curl + "-f -o /dev/null '" + url + "/api/models' '" + url + "/api/expert-demand'").c_str()),
              0);
    TestClient plain = hub.client();
    EXPECT_EQ(plain.get("/api/health", "").status, 0);
  }
  options = {};
  TestHub hub(options);
  ServerOptions open_to_all;
  open_to_all.listen = {"0.0.0.0", 0};
  const auto refused =
      Server::start(open_to_all, hub.hub->router(), hub.hub->authenticator(), hub.hub->relay_host(),
                    [](const std::string&) {});
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("loopback"), std::string::npos);
  std::filesystem::remove_all(top);
}

}  // namespace
}  // namespace kvasir::hub
