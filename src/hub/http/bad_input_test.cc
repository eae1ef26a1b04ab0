// What a hostile or broken client sends: the right status, a sentence, and the hub lives.

#include <gtest/gtest.h>

#include "hub/http/test_hub.h"

namespace kvasir::hub {
namespace {

class BadInput : public testing::Test {
 protected:
  // The hub goes on answering, on a connection of its own.
  void expect_alive() {
    TestClient client = hub_.client();
    EXPECT_EQ(client.get("/api/models", hub_.worker).status, 200);
  }
  void expect_refusal(const Reply& reply, int status) {
    EXPECT_EQ(reply.status, status) << reply.body;
    EXPECT_GT(reply.error().size(), 10u) << reply.body;
    EXPECT_EQ(reply.headers.at("content-type"), "application/json");
  }
  Reply raw(std::string_view bytes) {
    TestClient client = hub_.client();
    client.send(bytes);
    return client.receive();
  }
  Reply get(std::string_view target, std::string_view extra = {}) {
    TestClient client = hub_.client();
    return client.get(target, hub_.worker, extra);
  }

  TestHub hub_;
};

constexpr std::string_view kShard = "/api/proxy/models/m/expert-shard?layers=0:1&experts=0:2";

TEST_F(BadInput, Addresses) {
  hub_.wait_ready();
  for (const char* target :
       {"/api/proxy/models/../../etc/passwd/expert-shard?layers=0:1&experts=0:1",
        "/api/proxy/models/%2e%2e/expert-shard", "/api/models/..%2f..%2fdata/manifest", "/api/models/a%00b/manifest",
        "/api/models/%zz/manifest", "/api/expert-demand?model=m&model=m"})
    expect_refusal(get(target), 400);
  for (const char* target :
       {"/index", "/api", "/api/nothing", "/api/models/m", "/api/models/unknown/manifest", "/api/models/m.gguf/manifest",
        "/etc/passwd", "/api/proxy/models/unknown/expert-shard?layers=0:1&experts=0:1",
        "/api/expert-demand?model=unknown", "/api/models//manifest", "/api/models/m/manifest/"})
    expect_refusal(get(target), 404);
  expect_refusal(get("/" + std::string(5000, 'a')), 414);
  expect_refusal(raw("DELETE /api/models HTTP/1.1\r\nHost: h\r\n\r\n"), 405);
  expect_alive();
}

TEST_F(BadInput, SliceRanges) {
  hub_.wait_ready();
  for (const char* query :
       {"layers=2:0&experts=0:1", "layers=0:3&experts=0:1", "layers=0:1&experts=0:9", "layers=0:1&experts=5:5",
        "layers=0:1", "experts=0:1", "", "layers=0:1&experts=-1:4", "layers=0:1&experts=0:18446744073709551617",
        "layers=a&experts=b", "layers=0:1&experts=0:1&layer=0", "layer=0&expert_begin=4&expert_end=2",
        "layer=0&expert_begin=0", "layer=9&expert_begin=0&expert_end=1", "layers=0:1&experts=0:4294967296",
        "layers=&experts="})
    expect_refusal(get(std::string("/api/proxy/models/m/expert-shard?") + query), 400);
  for (const char* range : {"bytes=5-2", "bytes=0-10,5-20", "bytes=99999999999-",
                            "bytes=18446744073709551616-18446744073709551617", "bytes=x-y", "bytes=-0"}) {
    const Reply reply = get(kShard, std::string("Range: ") + range + "\r\n");
    expect_refusal(reply, 416);
    EXPECT_TRUE(reply.headers.at("content-range").starts_with("bytes */"));
  }
  expect_alive();
}

TEST_F(BadInput, Tokens) {
  const std::string expired = hub_.token(Scope::kWorker, unix_now() - 1), revoked = hub_.token(Scope::kWorker);
  ASSERT_TRUE(*hub_.hub->store().revoke_token(revoked.substr(7, 16), unix_now()));
  TestClient client = hub_.client();
  for (const std::string& token :
       {std::string(), expired, revoked, std::string("kvasir_0000000000000000_") + std::string(64, '0'),
        std::string("x"), hub_.worker + "0", std::string(3000, 'k')}) {
    client.connect();
    const Reply reply = client.get("/api/models", token);
    expect_refusal(reply, 401);
    EXPECT_EQ(reply.headers.at("www-authenticate"), "Bearer");
  }
  client.connect();
  EXPECT_NE(client.get("/api/models", expired).error().find("expired"), std::string::npos);
  client.connect();
  EXPECT_NE(client.get("/api/models", revoked).error().find("revoked"), std::string::npos);
  client.connect();
  client.send("GET /api/models HTTP/1.1\r\nHost: h\r\nAuthorization: Basic dXNlcjpwYXNz\r\n\r\n");
  expect_refusal(client.receive(), 401);
  // The right token in the wrong place.
  client.connect();
  expect_refusal(client.get("/api/expert-routes", hub_.worker), 403);
  client.connect();
  expect_refusal(client.post("/api/expert-coverage", hub_.backbone, {{"worker_id", "w"}, {"model", "m"}}), 403);
  client.connect();
  expect_refusal(client.get("/api/admin/nodes", hub_.backbone), 403);
  // Nothing that was sent is in the log.
  for (const std::string& token : {hub_.worker, expired, revoked})
    EXPECT_EQ(hub_.log_text().find(token.substr(24)), std::string::npos);
  expect_alive();
}

TEST_F(BadInput, Bodies) {
  TestClient client = hub_.client();
  const auto post_raw = [&](std::string_view body) {
    client.connect();
    client.send(TestClient::request("POST", "/api/expert-coverage", hub_.worker, body));
    return client.receive();
  };
  for (const char* body : {"", "{", "[]", "null", "3", "\"x\"", "{\"worker_id\":", "\xff\xfe", "{}"})
    expect_refusal(post_raw(body), 400);
  expect_refusal(post_raw(std::string(500'000, '[')), 400);
  expect_refusal(post_raw("{\"a\":" + std::string(400'000, '[') + std::string(400'000, ']') + "}"), 400);
  // Larger than allowed: announced, in chunks, and announced falsely.
  expect_refusal(post_raw(std::string(2'000'000, ' ')), 413);
  client.connect();
  client.send(
      std::format("POST /api/expert-coverage HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {}\r\nContent-Length: "
                  "99999999999999\r\n\r\n",
                  hub_.worker));
  expect_refusal(client.receive(), 413);
  client.connect();
  client.send(std::format(
      "POST /api/expert-coverage HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {}\r\nTransfer-Encoding: chunked\r\n\r\n",
      hub_.worker));
  for (int i = 0; i < 40 && client.send("10000\r\n" + std::string(65536, ' ') + "\r\n"); ++i) {
  }
  expect_refusal(client.receive(), 413);
  client.connect();
  client.send(TestClient::request("GET", "/api/models", hub_.worker, "a body where none belongs"));
  expect_refusal(client.receive(), 413);
  expect_alive();
}

TEST_F(BadInput, WrongTypes) {
  using nlohmann::json;
  const json good = {{"worker_id", "w"}, {"model", "m"}, {"segments", {{0, 0, 4}}}, {"url", "127.0.0.1:1"}};
  TestClient client = hub_.client();
  const auto with = [&](const char* name, json value) {
    json body = good;
    body[name] = std::move(value);
    return client.post("/api/expert-coverage", hub_.worker, body);
  };
  EXPECT_EQ(client.post("/api/expert-coverage", hub_.worker, good).status, 200);
  for (const json& wrong : {json(3), json::array(), json(""), json(std::string(200, 'x')), json("a\nb"), json(nullptr)})
    expect_refusal(with("worker_id", wrong), 400);
  expect_refusal(with("model", 3), 400);
  expect_refusal(with("model", "unknown"), 404);
  for (const char* wrong :
       {R"(3)", R"([3])", R"([[0,0]])", R"([[0,4,0]])", R"([[0,0,9]])", R"([[2,0,4]])", R"([[0,-1,4]])",
        R"([[0,0,1e30]])", R"([["0",0,4]])", R"([[0,0.5,4]])", R"([[0,0,18446744073709551615]])", R"({"0":[[0,4]]})"})
    expect_refusal(with("segments", json::parse(wrong)), 400);
  for (const char* wrong :
       {R"([])", R"({"x":[[0,4]]})", R"({"0":3})", R"({"0":[[0]]})", R"({"0:2":[[0,4]]})", R"({"0":[[4,0]]})"})
    expect_refusal(with("sets", json::parse(wrong)), 400);
  for (const char* wrong : {"no port", "a b:1", "host", "x\ty:1"}) expect_refusal(with("url", wrong), 400);
  expect_refusal(with("fingerprint", "abc"), 400);
  expect_refusal(with("fingerprint", std::string(64, 'g')), 400);
  for (const json& wrong : {json("fast"), json(-1), json::array()}) expect_refusal(with("speed", wrong), 400);
  expect_refusal(with("draining", "yes"), 400);
  expect_refusal(with("n_layer", 7), 400);
  expect_refusal(with("proof", 3), 400);
  for (const json& wrong : {json{{"max_experts", "many"}}, json{{"max_experts", -1}}, json{{"memory_bytes", 1.5}},
                            json{{"model", 3}, {"max_experts", 8}}, json::object()})
    expect_refusal(client.post("/api/expert-volunteer", hub_.worker, wrong), 400);
  for (const json& wrong : {json{{"model", "m"}, {"saturation", 2}}, json{{"model", "m"}, {"layers", 3}},
                            json{{"model", "m"}, {"layers", {{{"layer", 0}, {"uses", "x"}}}}},
                            json{{"model", "m"}, {"layers", {{{"layer", 0}, {"uses", {-1}}}}}}})
    expect_refusal(client.post("/api/expert-heat", hub_.backbone, wrong), 400);
  for (const json& wrong :
       {json{{"entries", 3}}, json{{"entries", {3}}}, json{{"entries", {{{"worker_id", "w"}, {"pairs", -1}}}}},
        json{{"day", "2020-01-01"}, {"entries", json::array()}},
        json{{"day", "yesterday"}, {"entries", json::array()}}})
    expect_refusal(client.post("/api/contributions", hub_.backbone, wrong), 400);
  expect_refusal(client.get("/api/contributions?from=2026-02-30", hub_.backbone), 400);
  expect_refusal(client.get("/api/contributions?from=2020-01-01&to=2026-01-01", hub_.backbone), 400);
  expect_alive();
}

TEST_F(BadInput, NotEvenHttp) {
  expect_refusal(raw("this is not a request\r\n\r\n"), 400);
  expect_refusal(
      raw(std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11) + std::string(600, 'x') + "\r\n\r\n"), 400);
  expect_refusal(raw("GET /api/models HTTP/1.1\r\nHost: h\r\nX: " + std::string(20'000, 'y') + "\r\n\r\n"), 431);
  expect_refusal(
      raw("POST /api/auth/challenge HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nnot a chunk\r\n"), 400);
  raw("GET /api/models HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n");
  raw(std::string(100'000, '\0'));
  {
    TestClient leaves_in_the_middle = hub_.client();
    leaves_in_the_middle.send("GET ");
  }
  expect_alive();
}

TEST(Limits, SlowAndIdleClientsAreLetGo) {
  TestHub::Options options;
  options.server.header_timeout = std::chrono::milliseconds(300);
  options.server.body_timeout = std::chrono::milliseconds(300);
  options.server.idle_timeout = std::chrono::milliseconds(300);
  TestHub hub(options);
  TestClient idle = hub.client(), slow_header = hub.client(), slow_body = hub.client();
  slow_header.send("GET /api/mod");
  slow_body.send(std::format(
      "POST /api/expert-volunteer HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {}\r\nContent-Length: 50\r\n\r\n{{",
      hub.worker));
  for (TestClient* client : {&idle, &slow_header, &slow_body}) EXPECT_EQ(client->receive().status, 0);
  for (int i = 0; i < 100 && hub.server->stats().connections > 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(hub.server->stats().connections, 0u);
}

TEST(Limits, IdleConnectionsMakeRoomForOthers) {
  TestHub::Options options;
  options.server.connections_max = 64;
  options.server.connections_per_address_max = 64;
  TestHub hub(options);
  std::vector<std::unique_ptr<TestClient>> idle;
  for (int i = 0; i < 300; ++i) idle.push_back(std::make_unique<TestClient>(hub.server->port()));
  for (int i = 0; i < 20; ++i) {
    TestClient client = hub.client();
    const Reply reply = client.get("/api/health", "");
    EXPECT_EQ(reply.status, 200) << reply.body;
  }
  EXPECT_LE(hub.server->stats().connections, 64u);
}

TEST(Limits, AskingTooOftenIsAnsweredWithAWait) {
  TestHub::Options options;
  options.server.per_address = {1000, 1000};
  options.server.per_token = {1, 3};
  TestHub hub(options);
  TestClient client = hub.client();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(client.get("/api/models", hub.worker).status, 200);
  const Reply refused = client.get("/api/models", hub.worker);
  EXPECT_EQ(refused.status, 429);
  EXPECT_EQ(refused.headers.at("retry-after"), "1");
  client.connect();
  EXPECT_EQ(client.get("/api/models", hub.backbone).status, 200);  // another token is not held back
}

TEST(Limits, GuessingTokensIsSlow) {
  TestHub::Options options;
  options.server.per_address = {1, 100};
  TestHub hub(options);
  int refused = 0;
  for (int i = 0; i < 20; ++i) {
    TestClient client = hub.client();
    if (client.get("/api/models", "kvasir_0000000000000000_" + std::string(64, '0')).status == 429) ++refused;
  }
  EXPECT_GE(refused, 8);
}

}  // namespace
}  // namespace kvasir::hub
