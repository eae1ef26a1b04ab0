// The dashboard's files and its feed, over a real socket.

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <sstream>

#include "hub/http/test_hub.h"

namespace kvasir::hub {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

TestHub::Options closed_group() {
  TestHub::Options options;
  options.no_proof = true;
  return options;
}

json beat(const char* id, int begin, int end) {
  return {
      {"worker_id", id}, {"model", "m"}, {"segments", {{0, begin, end}}}, {"url", "192.0.2.1:7000"}, {"device", "CPU"}};
}

// Follows a feed with a client of its own.
class Page {
 public:
  Page(TestHub& hub, std::string_view token, std::string_view target = "/api/view/events") : client_(hub.client()) {
    client_.send(TestClient::request("GET", target, token));
    header_ = client_.receive_header();
  }
  const Reply& header() const { return header_; }

  // The next event of that name.
  json next(const std::string& name) {
    for (int i = 0; i < 1000; ++i) {
      const std::size_t end = text_.find("\n\n");
      if (end == std::string::npos) {
        const std::string chunk = client_.receive_chunk();
        if (chunk.empty()) return nullptr;
        text_ += chunk;
        continue;
      }
      const std::string event = text_.substr(0, end);
      text_.erase(0, end + 2);
      if (event.starts_with("event: " + name + "\ndata: ")) return json::parse(event.substr(event.find("data: ") + 6));
    }
    return nullptr;
  }

 private:
  TestClient client_;
  Reply header_;
  std::string text_;
};

TEST(View, ThePageIsServedWithAStrictPolicy) {
  TestHub hub;
  TestClient client = hub.client();
  const char* const source = std::getenv("KVASIR_SOURCE_DIR");
  ASSERT_NE(source, nullptr);
  for (const auto& [target, file, type] :
       {std::tuple("/", "index.html", "text/html"), std::tuple("/app.js", "app.js", "text/javascript"),
        std::tuple("/app.css", "app.css", "text/css"), std::tuple("/icon.svg", "icon.svg", "image/svg+xml")}) {
    const Reply reply = client.get(target, "");
    EXPECT_EQ(reply.status, 200) << target;
    std::stringstream expected;
    expected << std::ifstream(std::string(source) + "/web/dist/" + file).rdbuf();
    EXPECT_TRUE(reply.body == expected.str()) << target;  // not worth printing
    EXPECT_TRUE(reply.headers.at("content-type").starts_with(type)) << target;
    const std::string& policy = reply.headers.at("content-security-policy");
    EXPECT_NE(policy.find("default-src 'none'"), std::string::npos);
    EXPECT_EQ(policy.find("unsafe"), std::string::npos);
    EXPECT_EQ(policy.find("http"), std::string::npos);
    const Reply again = client.get(target, "", "If-None-Match: " + reply.headers.at("etag") + "\r\n");
    EXPECT_EQ(again.status, 304) << target;
  }
  const Reply packed = client.get("/app.js", "", "Accept-Encoding: gzip, br\r\n");
  EXPECT_EQ(packed.headers.at("content-encoding"), "gzip");
  EXPECT_EQ(packed.body.substr(0, 2), "\x1f\x8b");
}

TEST(View, TheFeedTellsWhatChanges) {
  TestHub hub(closed_group());
  TestClient node = hub.client();
  Page page(hub, hub.token(Scope::kViewer));
  EXPECT_EQ(page.header().status, 200);
  EXPECT_TRUE(page.header().headers.at("content-type").starts_with("text/event-stream"));
  const json hello = page.next("hello");
  EXPECT_EQ(hello["model"], "m");
  EXPECT_EQ(hello["n_expert"], json({8, 8}));
  EXPECT_EQ(page.next("coverage")["layers"].size(), 2u);
  EXPECT_EQ(page.next("workers")["total"], 0);

  EXPECT_EQ(node.post("/api/expert-coverage", hub.worker, beat("w", 0, 4)).status, 200);
  const json layers = page.next("coverage")["layers"];
  ASSERT_EQ(layers.size(), 1u);  // the other layer did not change
  EXPECT_EQ(layers[0][0], 0);
  EXPECT_EQ(layers[0][1][0], json({0, 4, 1, 0, 2, 0.5}));
  EXPECT_EQ(layers[0][1][1], json({4, 8, 0, 0, 2, 1.0}));
  const json workers = page.next("workers")["workers"];
  ASSERT_EQ(workers.size(), 1u);
  EXPECT_EQ(workers[0]["id"], "w");
  EXPECT_EQ(workers[0]["state"], "serving");
  EXPECT_EQ(workers[0]["device"], "CPU");
  EXPECT_EQ(workers[0]["path"], "direct");
  EXPECT_FALSE(workers[0].contains("url"));  // addresses are the operator's alone
  Page operators(hub, hub.admin);
  EXPECT_EQ(operators.next("workers")["workers"][0]["url"], "192.0.2.1:7000");
}

TEST(View, ALineThatEndsShowsWithinTwoSeconds) {
  TestHub hub(closed_group());
  TestClient node = hub.client();
  node.post("/api/expert-coverage", hub.worker, beat("w", 0, 8));
  Page page(hub, hub.token(Scope::kViewer));
  EXPECT_EQ(page.next("coverage")["layers"][0][1][0][2], 1);
  EXPECT_EQ(page.next("workers")["workers"][0]["state"], "serving");
  {
    const Page line(hub, hub.worker, "/api/expert-line?worker_id=w");
    EXPECT_EQ(line.header().status, 200);
    EXPECT_EQ(Page(hub, hub.token(Scope::kWorker), "/api/expert-line?worker_id=w").header().status, 404);
  }
  const auto ended = std::chrono::steady_clock::now();
  EXPECT_EQ(page.next("coverage")["layers"][0][1][0][2], 0);
  EXPECT_EQ(page.next("workers")["workers"][0]["state"], "lost");
  std::printf("shown %.2f s after the line ended\n",
              std::chrono::duration<double>(std::chrono::steady_clock::now() - ended).count());
  node.post("/api/expert-coverage", hub.worker, beat("w", 0, 8));
  EXPECT_EQ(page.next("coverage")["layers"][0][1][0][2], 1);
}

TEST(View, WhatBackbonesReportBecomesTraffic) {
  TestHub hub(closed_group());
  TestClient backbone = hub.client();
  Page page(hub, hub.token(Scope::kViewer));
  EXPECT_EQ(page.next("traffic")["backbones"], 0);
  const auto report = [&](int rounds) {
    return backbone.post(
        "/api/expert-heat", hub.backbone,
        {{"model", "m"},
         {"backbone", "b"},
         {"stats",
          {{"rounds", rounds},
           {"pairs_remote", rounds * 8},
           {"unknown_to_this_hub", "x"},
           {"layers", {{{"layer", 1}, {"rounds", 5}, {"round_ns_sum", 752500}, {"p99_ns_below", 1048576}}}},
           {"workers", {{{"name", "w"}, {"answers", 4}, {"answer_ns_sum", 4938000}, {"state", "up"}}}}}}});
  };
  backbone.post("/api/expert-coverage", hub.worker, beat("w", 0, 8));
  EXPECT_EQ(report(100).status, 200);
  std::this_thread::sleep_for(milliseconds(400));
  EXPECT_EQ(report(200).status, 200);
  json traffic = json::object();
  for (int i = 0; i < 20 && traffic.value("rounds", 0.0) == 0; ++i) traffic = page.next("traffic");
  EXPECT_GT(traffic["rounds"], 10);
  EXPECT_EQ(traffic["backbones"], 1);
  EXPECT_EQ(traffic["local"], 0);
  EXPECT_GT(traffic["tokens"], 0);
  Page fresh(hub, hub.token(Scope::kViewer));
  EXPECT_EQ(fresh.next("workers")["workers"][0]["latency_us"], 1235.0);
  EXPECT_EQ(fresh.next("latency")["layers"], json({{1, 5, 150.5, 1049.0}}));
  for (const json& wrong : {json{{"rounds", -1}}, json{{"layers", 3}}, json{{"workers", {1}}}, json(7)})
    EXPECT_EQ(backbone.post("/api/expert-heat", hub.backbone, {{"model", "m"}, {"stats", wrong}}).status, 400) << wrong;
}

TEST(View, WhoMayLook) {
  TestHub hub(closed_group());
  TestClient client = hub.client();
  const std::string viewer = hub.token(Scope::kViewer);
  EXPECT_EQ(client.get("/api/view/events", "").status, 401);
  client.connect();
  EXPECT_EQ(client.get("/api/view/contributions", viewer).status, 200);
  EXPECT_EQ(client.get("/api/expert-demand", viewer).status, 200);
  EXPECT_EQ(client.get("/api/expert-routes", viewer).status, 403);
  client.connect();
  EXPECT_EQ(client.post("/api/expert-coverage", viewer, beat("w", 0, 8)).status, 403);

  TestHub::Options open = closed_group();
  open.public_view = true;
  TestHub shown(open);
  EXPECT_EQ(Page(shown, "").header().status, 200);
  TestClient anybody = shown.client();
  EXPECT_EQ(anybody.get("/api/view/contributions", "").status, 200);
  EXPECT_EQ(anybody.get("/api/expert-routes", "").status, 401);
}

TEST(View, ContributionsByDay) {
  TestHub hub(closed_group());
  TestClient client = hub.client();
  const auto report = [&](const std::string& token, const char* worker, int pairs) {
    client.post("/api/contributions", token,
                {{"entries", {{{"worker_id", worker}, {"pairs", pairs}, {"bytes", 10 * pairs}}}}});
  };
  report(hub.backbone, "a", 10);
  report(hub.worker, "a", 12);  // the worker's own word counts where no backbone speaks
  report(hub.worker, "b", 30);
  const json all = client.get("/api/view/contributions", hub.admin).json();
  EXPECT_EQ(all["total"].size(), 30u);
  EXPECT_EQ(all["total"][29], 40);
  ASSERT_EQ(all["workers"].size(), 2u);
  EXPECT_EQ(all["workers"][0]["id"], "b");
  EXPECT_EQ(all["workers"][1]["pairs"], 10);
  EXPECT_EQ(all["workers"][1]["bytes"], 100);
}

TEST(View, MetricsAreForViewersAndAddUp) {
  TestHub hub(closed_group());
  hub.hub->set_server_stats([&] { return hub.server->stats(); });
  TestClient client = hub.client();
  client.post("/api/expert-coverage", hub.worker, beat("w", 0, 6));
  EXPECT_EQ(client.get("/metrics", hub.worker).status, 403);
  client.connect();
  const Reply reply = client.get("/metrics", hub.token(Scope::kViewer));
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.headers.at("content-type"), "text/plain; version=0.0.4; charset=utf-8");
  for (const char* line :
       {"kvasir_hub_info{version=\"test\"} 1", "kvasir_hub_experts{model=\"m\"} 16",
        "kvasir_hub_experts_at_target{model=\"m\"} 0", "kvasir_hub_experts_unheld{model=\"m\"} 10",
        "kvasir_hub_replicas_missing{model=\"m\"} 26", "kvasir_hub_workers{model=\"m\",state=\"serving\"} 1",
        "kvasir_hub_pairs_total{model=\"m\",where=\"remote\"} 0"})
    EXPECT_NE(reply.body.find(std::string(line) + "\n"), std::string::npos) << line << "\n" << reply.body;
  EXPECT_EQ(reply.body.find(hub.worker), std::string::npos);
  hub.hub->set_server_stats({});
}

TEST(View, FollowersAreLimitedAndStopWithTheServer) {
  TestHub hub(closed_group());
  const std::string viewer = hub.token(Scope::kViewer);
  std::vector<std::unique_ptr<Page>> pages;
  for (std::size_t i = 0; i < kFollowersMax; ++i) {
    pages.push_back(std::make_unique<Page>(hub, i % 2 ? viewer : hub.admin));
    ASSERT_EQ(pages.back()->header().status, 200);
    if (i % 100 == 99) std::this_thread::sleep_for(milliseconds(600));  // the address's own limit
  }
  EXPECT_EQ(Page(hub, viewer).header().status, 503);
  pages.pop_back();
  int status = 0;
  for (int i = 0; i < 100 && status != 200; ++i) {
    std::this_thread::sleep_for(milliseconds(20));
    status = Page(hub, viewer).header().status;
  }
  EXPECT_EQ(status, 200);
  const auto begin = std::chrono::steady_clock::now();
  hub.server->stop(std::chrono::seconds(10));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

}  // namespace
}  // namespace kvasir::hub
