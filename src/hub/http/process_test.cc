// kvasir-hub as a process: killed without warning, asked by thousands, and its memory.
// KVASIR_LONG=1 (the ctest entry hub_process_long sets it) runs the full counts.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "gguf/moe_model.h"
#include "gguf/synth.h"
#include "hub/http/test_client.h"

extern char** environ;

namespace kvasir::hub {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr double kPeakMibMax = 1000;  // mostly the sanitizer's own; the downloads held in memory would be ten times as much
#else
constexpr double kPeakMibMax = 100;
#endif

bool full_counts() { return std::getenv("KVASIR_LONG") != nullptr; }

class HubProcess : public testing::Test {
 protected:
  void SetUp() override {
    const char* build = std::getenv("KVASIR_BUILD_DIR");
    ASSERT_NE(build, nullptr) << "run by ctest";
    program_ = fs::path(build) / "bin" / "kvasir-hub";
    char folder[] = "/tmp/kvasir-hub-process-XXXXXX";
    ASSERT_NE(::mkdtemp(folder), nullptr);
    top_ = folder;
    fs::create_directories(top_ / "models");
    worker_ = token("worker");
    backbone_ = token("backbone");
    admin_ = token("admin");
  }
  void TearDown() override {
    kill_hub(SIGKILL);
    fs::remove_all(top_);
  }

  // The token alone is on standard output.
  std::string token(const std::string& scope) const {
    const std::string path = top_ / "token";
    // Quoted: the build folder's path may have spaces.
    const std::string command = std::format("'{}' token create --data '{}' --scope {} > '{}'", program_.string(),
                                            (top_ / "data").string(), scope, path);
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
    std::ifstream in(path);
    std::string first, second;
    std::getline(in, first);
    EXPECT_FALSE(std::getline(in, second));
    EXPECT_TRUE(first.starts_with("kvasir_"));
    return first;
  }

  void start_hub() {
    const std::string out = top_ / "url", log = top_ / "log";
    fs::remove(out);
    std::vector<std::string> words = {program_,
                                      "--data",
                                      top_ / "data",
                                      "--models",
                                      top_ / "models",
                                      "--listen",
                                      std::format("127.0.0.1:{}", port_),
                                      "--no-proof"};
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_addopen(&actions, 2, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    ASSERT_EQ(::posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    for (int i = 0; i < 500; ++i) {
      std::ifstream in(out);
      std::string url;
      if (std::getline(in, url) && !in.eof()) {
        port_ = static_cast<std::uint16_t>(std::stoi(url.substr(url.rfind(':') + 1)));
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    FAIL() << "kvasir-hub does not start; its log: " << log_text();
  }
  int kill_hub(int signal) {
    if (pid_ <= 0) return 0;
    ::kill(pid_, signal);
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }
  std::string log_text() const {
    std::ifstream in(top_ / "log");
    return {std::istreambuf_iterator<char>(in), {}};
  }
  // "VmHWM" or "VmRSS" in bytes. The page cache of mapped files does not count: nothing is mapped.
  std::uint64_t memory_bytes(const std::string& name) const {
    std::ifstream in(std::format("/proc/{}/status", pid_));
    for (std::string line; std::getline(in, line);)
      if (line.starts_with(name + ":")) return std::stoull(line.substr(name.size() + 1)) * 1024;
    return 0;
  }

  fs::path program_, top_;
  std::string worker_, backbone_, admin_;
  std::uint16_t port_ = 0;
  pid_t pid_ = -1;
};

TEST_F(HubProcess, KilledUnderLoadItLosesNothingAcknowledged) {
  const int rounds = full_counts() ? 50 : 4;
  std::int64_t acknowledged = 0, sent = 0;
  for (int round = 0; round < rounds; ++round) {
    start_hub();
    std::atomic<std::int64_t> round_acknowledged = 0, round_sent = 0;
    {
      std::vector<std::jthread> clients;
      for (int c = 0; c < 3; ++c)
        clients.emplace_back([&, c] {
          TestClient client(port_);
          for (int i = 0;; ++i) {
            const json report = {{"report_id", std::format("{}-{}-{}", round, c, i)},
                                 {"entries", {{{"worker_id", "w"}, {"pairs", 1}}}}};
            ++round_sent;
            const Reply reply = client.post("/api/contributions", backbone_, report);
            if (reply.status != 200 && reply.status != 429) return;
            if (reply.status == 200) ++round_acknowledged;
            if (reply.status == 429) std::this_thread::sleep_for(std::chrono::milliseconds(20));
          }
        });
      for (int i = 0; i < 1000 && round_acknowledged == 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      std::this_thread::sleep_for(std::chrono::milliseconds(100 + 37 * (round % 7)));
      kill_hub(SIGKILL);
    }
    acknowledged += round_acknowledged;
    sent += round_sent;
    ASSERT_GT(round_acknowledged, 0) << log_text();
  }
  const std::string check =
      std::format("'{}' check --data '{}' > /dev/null", program_.string(), (top_ / "data").string());
  ASSERT_EQ(std::system(check.c_str()), 0) << check << " after " << log_text();
  start_hub();
  TestClient client(port_);
  std::int64_t kept = 0;
  const json all = client.get("/api/contributions", admin_).json();
  for (const json& entry : all["entries"]) kept += entry["pairs"].get<std::int64_t>();
  EXPECT_GE(kept, acknowledged);
  EXPECT_LE(kept, sent);
  RecordProperty("acknowledged", std::to_string(acknowledged));
}

TEST_F(HubProcess, StopsInOrderAndStartsAgain) {
  start_hub();
  TestClient client(port_);
  EXPECT_EQ(client.get("/api/health", "").status, 200);
  const int status = kill_hub(SIGTERM);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  start_hub();
  client.connect();
  EXPECT_EQ(client.get("/api/models", worker_).status, 200);
}

TEST_F(HubProcess, NodesAreListedBannedAndEvictedByCommand) {
  ASSERT_TRUE(gguf::write_synthetic(gguf::SynthOptions{}, (top_ / "models" / "tiny.gguf").string()));
  start_hub();
  TestClient client(port_);
  const json beat = {{"worker_id", "laptop"}, {"model", "tiny"}, {"segments", {{0, 0, 4}}}, {"url", "192.0.2.1:7000"}};
  const auto comes = [&] { return client.post("/api/expert-coverage", worker_, beat).status; };
  const auto node = [&](const std::string& words) {  // exit status and what was printed
    const std::string out = top_ / "out";
    const std::string command = std::format("KVASIR_TOKEN={} '{}' node {} --url http://127.0.0.1:{} > '{}' 2>&1", admin_, program_.string(),
                                            words, port_, out);
    const int status = std::system(command.c_str());
    std::ifstream in(out);
    return std::pair(WEXITSTATUS(status), std::string(std::istreambuf_iterator<char>(in), {}));
  };
  for (int i = 0; i < 500 && comes() != 200; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ASSERT_EQ(comes(), 200) << log_text();
  EXPECT_NE(node("list").second.find("laptop"), std::string::npos);
  EXPECT_EQ(node("evict laptop").first, 0);
  EXPECT_EQ(node("list").second.find("laptop"), std::string::npos);
  const auto unknown = node("evict laptop");
  EXPECT_NE(unknown.first, 0);
  EXPECT_NE(unknown.second.find("knows no such node"), std::string::npos);
  EXPECT_EQ(comes(), 200);
  EXPECT_EQ(node("ban laptop --reason 'wrong answers'").first, 0);
  EXPECT_EQ(comes(), 403);
  EXPECT_NE(node("list").second.find("banned: wrong answers"), std::string::npos);
  const json line = json::parse(node("list --json").second);
  EXPECT_EQ(line["worker_id"], "laptop");
  EXPECT_EQ(line["banned"], true);
  EXPECT_EQ(node("unban laptop").first, 0);
  EXPECT_EQ(comes(), 200);
  EXPECT_NE(node("unban laptop").first, 0);
  admin_ = worker_;
  const auto refused = node("list");
  EXPECT_NE(refused.first, 0);
  EXPECT_EQ(refused.second.find(worker_), std::string::npos);
}

TEST_F(HubProcess, LivesThroughThousandsOfIdleConnections) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  const std::size_t n = full_counts() ? 10'000 : 1500;
  if (limit.rlim_cur < n + 100) GTEST_SKIP() << "the system allows " << limit.rlim_cur << " descriptors";
  start_hub();
  std::vector<std::unique_ptr<TestClient>> idle;
  for (std::size_t i = 0; i < n; ++i) idle.push_back(std::make_unique<TestClient>(port_));
  for (int i = 0; i < 20; ++i) {
    TestClient client(port_);
    EXPECT_EQ(client.get("/api/models", worker_).status, 200);
  }
  std::printf("%zu idle connections: resident %.1f MiB\n", n, static_cast<double>(memory_bytes("VmRSS")) / (1 << 20));
}

TEST_F(HubProcess, FiftyDownloadsTakeNoMemory) {
  // The shape of a 122B model's layers; the experts are holes, which a file may have.
  gguf::SynthOptions synth;
  synth.n_layer = 2;
  synth.n_expert = full_counts() ? 256 : 32;
  synth.n_expert_used = 8;
  synth.n_embd = 3072;
  synth.n_ff = 1024;
  synth.sparse = true;
  ASSERT_TRUE(gguf::write_synthetic(synth, (top_ / "models" / "big.gguf").string()));
  start_hub();
  TestClient client(port_);
  for (int i = 0; i < 3000 && !client.get("/api/models", worker_).json()["models"][0]["ready"].get<bool>(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const std::string target = "/api/proxy/models/big/expert-shard?layers=0:2&experts=0:16";
  client.send(TestClient::request("HEAD", target, worker_));
  const Reply head = client.receive(true);
  ASSERT_EQ(head.status, 200);
  const std::uint64_t size = std::stoull(head.headers.at("content-length"));
  {
    const auto model = *gguf::MoeModel::open((top_ / "models" / "big.gguf").string());
    std::uint64_t slabs = 0;
    for (const auto& layer : model.layers()) slabs += 16 * layer.bytes_per_expert();
    EXPECT_LE(size - slabs, slabs / 100);
    std::printf("slice of 2 x 16 experts: %.1f MB, slabs %.1f MB\n", static_cast<double>(size) / 1e6,
                static_cast<double>(slabs) / 1e6);
  }
  std::atomic<int> complete = 0;
  {
    std::vector<std::jthread> downloads;
    for (int i = 0; i < 50; ++i)
      downloads.emplace_back([&, i] {
        const std::string count = std::format("{}/count{}", top_.string(), i);
        const std::string command =
            std::format("curl -sS -f -H 'Authorization: Bearer {}' 'http://127.0.0.1:{}{}' | wc -c > {}", worker_,
                        port_, target, count);
        EXPECT_EQ(std::system(command.c_str()), 0);
        std::uint64_t got = 0;
        std::ifstream(count) >> got;
        if (got == size) ++complete;
      });
  }
  EXPECT_EQ(complete, 50);
  const double peak = static_cast<double>(memory_bytes("VmHWM")) / (1 << 20);
  std::printf("50 downloads at once: peak resident %.1f MiB\n", peak);
  EXPECT_LT(peak, kPeakMibMax);
}

}  // namespace
}  // namespace kvasir::hub
