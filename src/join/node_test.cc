// A node in this process and a hub over a socket: pausing, and a model that is replaced.
#include "join/node.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "hub/http/test_hub.h"

namespace kvasir::join {
namespace {

using namespace std::chrono_literals;
using hub::TestHub;
using nlohmann::json;

class NodeTest : public testing::Test {
 protected:
  static TestHub::Options quick() {
    TestHub::Options options;
    options.market.heartbeat = 1s;
    options.market.ttl = 10s;
    return options;
  }
  NodeTest() : server(quick()) { server.wait_ready(); }
  ~NodeTest() override { stop(); }

  void start(std::uint64_t bytes_per_s = 0) {
    NodeOptions options;
    options.fetch.bytes_per_s_max = bytes_per_s;
    options.hub = {std::format("http://127.0.0.1:{}", server.server->port()), server.worker, ""};
    options.memory_bytes = 64u << 20;
    options.listen = {"127.0.0.1", 0};
    options.tls = false;
    options.data_dir = server.top / "node";
    options.cache_dir = server.top / "slices";
    options.software = "test";
    options.conditions.load_max = 2;
    options.conditions_interval = 20ms;
    options.look = [this] { return MachineState{.on_ac = true, .load = load, .minute_of_day = 0}; };
    options.log = [this](const std::string& line) {
      const std::lock_guard lock(mutex);
      lines.push_back(line);
    };
    options.wait = [this](Nanos time) {
      for (const TimePoint end = monotonic_now() + time; !stopping; std::this_thread::sleep_for(5ms))
        if (monotonic_now() >= end) return true;
      return false;
    };
    thread = std::thread([this, options] { status = run_node(options); });
  }
  void stop() {
    stopping = true;
    if (thread.joinable()) thread.join();
  }
  // Of the only node.
  json node() {
    hub::TestClient client = server.client();
    const json nodes = client.get("/api/admin/nodes", server.admin).json()["nodes"];
    return nodes.empty() ? json({{"experts_counted", 0}, {"draining", true}}) : nodes[0];
  }
  template <typename Done>
  static bool wait_for(Done&& done, Nanos limit = 60s) {
    for (const TimePoint begin = monotonic_now(); monotonic_now() - begin < limit; std::this_thread::sleep_for(20ms))
      if (done()) return true;
    return false;
  }
  std::string log_text() {
    const std::lock_guard lock(mutex);
    std::string out;
    for (const std::string& line : lines) out += line + "\n";
    return out;
  }

  TestHub server;
  std::atomic<double> load = 0;
  std::atomic<bool> stopping = false;
  Status status;
  std::mutex mutex;
  std::vector<std::string> lines;
  std::thread thread;
};

TEST_F(NodeTest, PausesByDrainingAndGoesOn) {
  start();
  ASSERT_TRUE(wait_for([&] { return node()["experts_counted"] == 16; })) << log_text();
  EXPECT_EQ(node()["draining"], false);
  // The hub knows how fast it is before anybody has asked it anything.
  ASSERT_TRUE(wait_for([&] { return node()["speed"] > 0; })) << log_text();
  EXPECT_NE(log_text().find("plan: 1"), std::string::npos) << log_text();
  const std::string url = node()["url"];
  load = 9;
  ASSERT_TRUE(wait_for([&] { return node()["draining"] == true; })) << log_text();
  EXPECT_NE(log_text().find("pausing: the machine is busy"), std::string::npos);
  // Nobody listens there any more, and the node still says that it lives.
  const auto where = net::parse_host_port(url);
  ASSERT_TRUE(wait_for([&] { return !net::connect_to(*where, 1s); }));
  load = 1.8;  // not yet well below the limit
  std::this_thread::sleep_for(200ms);
  EXPECT_EQ(node()["draining"], true);
  load = 0;
  ASSERT_TRUE(wait_for([&] { return node()["draining"] == false && node()["experts_counted"] == 16; })) << log_text();
  EXPECT_EQ(node()["url"], url);
  EXPECT_TRUE(net::connect_to(*where, 5s));
  stop();
  EXPECT_TRUE(status) << status.error().message;
}

TEST_F(NodeTest, ADownloadPausesToo) {
  start(300'000);  // several seconds for what it takes
  const auto fetched = [&] {
    std::uintmax_t sum = 0;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(server.top / "slices", error))
      if (entry.path().extension() == ".part") sum += entry.file_size(error);
    return sum;
  };
  ASSERT_TRUE(wait_for([&] { return fetched() > 0; })) << log_text();
  load = 9;
  ASSERT_TRUE(wait_for([&] { return log_text().find("pausing") != std::string::npos; })) << log_text();
  std::this_thread::sleep_for(300ms);  // what is on its way may still be written
  const std::uintmax_t before = fetched();
  std::this_thread::sleep_for(700ms);
  EXPECT_EQ(fetched(), before);
  load = 0;
  ASSERT_TRUE(wait_for([&] { return node()["experts_counted"] == 16; })) << log_text();
}

// Proofs about the old file failed for ever, and the node served what nobody asked for.
TEST_F(NodeTest, FetchesAnewWhenTheModelIsReplaced) {
  start();
  ASSERT_TRUE(wait_for([&] { return node()["experts_counted"] == 16; })) << log_text();
  server.write_model("m", 2);
  server.hub->catalogue().rescan_soon();
  ASSERT_TRUE(wait_for([&] { return log_text().find("does not accept") != std::string::npos; })) << log_text();
  ASSERT_TRUE(wait_for([&] { return node()["experts_counted"] == 16; })) << log_text();
  stop();
  EXPECT_TRUE(status) << status.error().message;
}

}  // namespace
}  // namespace kvasir::join
