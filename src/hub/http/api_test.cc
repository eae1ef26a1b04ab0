// The API over a real socket: the market, proofs, tokens, the ledger, and its description.

#include <gtest/gtest.h>
#include <openssl/evp.h>

#include <fstream>

#include "base/hex.h"
#include "gguf/slice.h"
#include "hub/http/test_hub.h"
#include "hub/models/proof.h"

namespace kvasir::hub {
namespace {

using nlohmann::json;

TestHub::Options closed_group() {
  TestHub::Options options;
  options.no_proof = true;
  return options;
}

TEST(Api, TheSeedExample) {
  TestHub hub(closed_group());
  TestClient client = hub.client();
  const auto beat = [&](const char* id, int a, int b) {
    const json body = {{"worker_id", id}, {"model", "seed"},         {"n_layer", 1},
                       {"n_expert", 256}, {"segments", {{0, a, b}}}, {"url", "192.0.2.1:7000"}};
    const Reply reply = client.post("/api/expert-coverage", hub.worker, body);
    EXPECT_EQ(reply.status, 200) << reply.body;
  };
  beat("A", 0, 128);
  beat("B", 128, 256);
  beat("C", 0, 128);
  const json demand = client.get("/api/expert-demand?model=seed", hub.worker).json();
  EXPECT_EQ(demand["model"], "seed");
  ASSERT_EQ(demand["segments"].size(), 2u);
  const auto is = [](const json& s, int a, int b, int replicas, double scarcity) {
    return s["layer"] == 0 && s["experts"] == json({a, b}) && s["replicas"] == replicas && s["target"] == 2 &&
           s["scarcity"] == scarcity;
  };
  EXPECT_TRUE(is(demand["segments"][0], 0, 128, 2, 0.0)) << demand;
  EXPECT_TRUE(is(demand["segments"][1], 128, 256, 1, 0.5)) << demand;
  const json got = client.post("/api/expert-volunteer", hub.worker, {{"model", "seed"}, {"max_experts", 64}}).json();
  EXPECT_EQ(got["assigned"], true);
  EXPECT_TRUE(is(got, 128, 192, 1, 0.5)) << got;
  EXPECT_EQ(got["n_layer"], 1);
  EXPECT_EQ(got["n_expert"], 256);
  EXPECT_FALSE(got["reservation"].get<std::string>().empty());
  EXPECT_GT(got["expires_in_s"], 0);
  EXPECT_EQ(got["also"], json::array());
}

TEST(Api, VolunteersByMemoryGetSeveralLayers) {
  TestHub hub(closed_group());
  TestClient client = hub.client();
  const json got =
      client.post("/api/expert-volunteer", hub.worker, {{"model", ""}, {"memory_bytes", 10'000'000'000}}).json();
  EXPECT_EQ(got["model"], "m");
  EXPECT_EQ(got["experts"], json({0, 8}));
  ASSERT_EQ(got["also"].size(), 1u);
  EXPECT_EQ(got["also"][0]["layer"], 1);
  EXPECT_EQ(got["n_embd"], 256);
  const json little = client.post("/api/expert-volunteer", hub.worker, {{"model", "m"}, {"memory_bytes", 10}}).json();
  EXPECT_EQ(little["assigned"], false);
  EXPECT_NE(little["reason"].get<std::string>().find("too few"), std::string::npos);
}

TEST(Api, ANodeProvesWhatItHolds) {
  TestHub hub;
  hub.wait_ready();
  TestClient client = hub.client();
  const std::string path = (hub.top / "slice.gguf").string();
  {
    const auto model = *gguf::MoeModel::open((hub.top / "models" / "m.gguf").string());
    ASSERT_TRUE(
        gguf::write_slice(*gguf::SliceLayout::make(model, *gguf::SlicePlan::from_ranges(model, "0:1", "0:4")), path));
  }
  const auto slice = *gguf::MoeModel::open(path);
  json body = {{"worker_id", "w"},        {"model", "m"},           {"n_layer", 2}, {"n_expert", 8},
               {"segments", {{0, 0, 4}}}, {"url", "192.0.2.1:7000"}};
  const auto routes = [&] { return client.get("/api/expert-routes?model=m", hub.backbone).json()["workers"]; };
  json reply = client.post("/api/expert-coverage", hub.worker, body).json();
  ASSERT_TRUE(reply.contains("challenge")) << reply;
  EXPECT_EQ(reply["experts_counted"], 0);
  EXPECT_TRUE(routes().empty());

  const auto answer = [&](const json& challenge, bool honest) {
    json hashes = json::array();
    for (const json& s : challenge["spans"])
      hashes.push_back(to_hex(
          *hash_span(slice, s["layer"], s["expert"], s["offset"], s["length"], challenge["id"].get<std::string>())));
    if (!honest) hashes[1] = std::string(64, '0');
    json proof = body;
    proof["proof"] = {{"id", challenge["id"]}, {"hashes", hashes}};
    return client.post("/api/expert-coverage", hub.worker, proof).json();
  };
  reply = answer(reply["challenge"], false);
  EXPECT_EQ(reply["experts_counted"], 0);
  ASSERT_TRUE(reply.contains("challenge"));
  const json used = reply["challenge"];
  reply = answer(used, true);
  EXPECT_EQ(reply["experts_counted"], 4);
  EXPECT_FALSE(reply.contains("challenge"));
  EXPECT_EQ(routes().size(), 1u);
  EXPECT_EQ(routes()[0]["segments"], json({{0, 0, 4}}));
  // A model whose file changes must be proved again.
  const auto before = hub.hub->catalogue().find("m");
  hub.write_model("m", 2);
  hub.hub->catalogue().rescan_soon();
  for (int i = 0; i < 500 && hub.hub->catalogue().find("m") == before; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(routes().empty());
  reply = client.post("/api/expert-coverage", hub.worker, body).json();
  ASSERT_TRUE(reply.contains("challenge"));
  EXPECT_EQ(answer(reply["challenge"], true)["experts_counted"], 0);  // true of the old file only
}

TEST(Api, AWorkerIdIsItsOwnersAlone) {
  TestHub hub(closed_group());
  TestClient client = hub.client();
  const json body = {{"worker_id", "w"}, {"model", "m"}, {"segments", {{0, 0, 4}}}, {"url", "192.0.2.1:7000"}};
  EXPECT_EQ(client.post("/api/expert-coverage", hub.worker, body).status, 200);
  const std::string other = hub.token(Scope::kWorker);
  const Reply refused = client.post("/api/expert-coverage", other, body);
  EXPECT_EQ(refused.status, 403);
  EXPECT_NE(refused.error().find("belongs to another token"), std::string::npos);
}

TEST(Api, RoutesWaitForAChange) {
  TestHub::Options options = closed_group();
  options.server.wait_max = std::chrono::milliseconds(700);
  TestHub hub(options);
  TestClient client = hub.client(), node = hub.client();
  const std::string version = client.get("/api/expert-routes", hub.backbone).json()["version"];
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(client.get("/api/expert-routes?since=" + version, hub.backbone).json()["version"], version);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(300));
  client.send(TestClient::request("GET", "/api/expert-routes?since=" + version, hub.backbone));
  node.post("/api/expert-coverage", hub.worker,
            {{"worker_id", "w"}, {"model", "m"}, {"segments", {{0, 0, 4}}}, {"url", "192.0.2.1:7000"}});
  const json changed = client.receive().json();
  EXPECT_NE(changed["version"], version);
  EXPECT_EQ(changed["workers"].size(), 1u);
}

TEST(Api, AHubThatHasJustStartedDoesNotSayThatNobodyServes) {
  TestHub::Options options = closed_group();
  options.market.heartbeat = std::chrono::milliseconds(400);
  options.nodes_were_here = true;
  TestHub hub(options);
  TestClient client = hub.client();
  const Reply waking = client.get("/api/expert-routes", hub.backbone);
  EXPECT_EQ(waking.status, 503);
  EXPECT_EQ(waking.headers.at("retry-after"), "1");
  const json beat = {{"worker_id", "w"}, {"model", "m"}, {"segments", {{0, 0, 4}}}, {"url", "192.0.2.1:7000"}};
  EXPECT_EQ(client.post("/api/expert-coverage", hub.worker, beat).status, 200);
  Reply awake = client.get("/api/expert-routes", hub.backbone);
  for (int i = 0; i < 200 && awake.status == 503; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    awake = client.get("/api/expert-routes", hub.backbone);
  }
  EXPECT_EQ(awake.json()["workers"].size(), 1u);
}

TEST(Api, ABackboneMayHaveAQuota) {
  TestHub hub(closed_group());
  TestClient client = hub.client();
  NewToken limited = make_token(Scope::kBackbone, "", std::nullopt, unix_now());
  limited.record.pairs_per_day = 100;
  ASSERT_TRUE(hub.hub->store().put_token(limited.record));
  const json beat = {{"worker_id", "w"}, {"model", "m"}, {"segments", {{0, 0, 4}}}, {"url", "192.0.2.1:7000"}};
  EXPECT_EQ(client.post("/api/expert-coverage", hub.worker, beat).status, 200);
  const auto use = [&](int pairs) {
    const json report = {{"entries", {{{"worker_id", "w"}, {"pairs", pairs}}}}};
    EXPECT_EQ(client.post("/api/contributions", limited.text, report).status, 200);
  };
  const auto table = [&] { return client.get("/api/expert-routes", limited.text).json(); };
  use(99);
  EXPECT_EQ(table()["workers"].size(), 1u);
  use(1);
  EXPECT_TRUE(table()["workers"].empty());
  EXPECT_NE(table()["reason"].get<std::string>().find("100 pairs"), std::string::npos);
  EXPECT_EQ(client.get("/api/expert-routes", hub.backbone).json()["workers"].size(), 1u);
}

TEST(Api, ALayersIdNamesItsModel) {
  TestHub hub(closed_group());
  TestClient client = hub.client();
  const auto model = *gguf::MoeModel::open((hub.top / "models" / "m.gguf").string());
  const std::string id = to_hex(*model.layer_id(model.layers()[1]));
  const json found = client.get("/api/layers?id=" + id, hub.backbone).json();
  EXPECT_EQ(found["model"], "m");
  ASSERT_EQ(found["layers"].size(), 2u);
  EXPECT_EQ(found["layers"][1], json({{"layer", 1}, {"group", "exps"}, {"layer_id", id}}));
  EXPECT_EQ(client.get("/api/layers?id=" + std::string(64, '0'), hub.backbone).status, 404);
  EXPECT_EQ(client.get("/api/layers", hub.backbone).status, 400);
}

TEST(Api, AnAdmittedKeyFetchesAToken) {
  TestHub hub;
  TestClient client = hub.client();
  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(EVP_PKEY_Q_keygen(nullptr, nullptr, "ED25519"),
                                                                &EVP_PKEY_free);
  Bytes raw(32);
  std::size_t n = raw.size();
  ASSERT_EQ(EVP_PKEY_get_raw_public_key(key.get(), reinterpret_cast<unsigned char*>(raw.data()), &n), 1);
  const std::string public_key = to_hex(raw);
  const auto nonce = [&] {
    return client.post("/api/auth/challenge", "", {{"public_key", public_key}}).json()["nonce"].get<std::string>();
  };
  const auto sign = [&](const std::string& text) {
    Bytes signature(64);
    std::size_t size = signature.size();
    const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
    EXPECT_EQ(EVP_DigestSignInit(context.get(), nullptr, nullptr, nullptr, key.get()), 1);
    EXPECT_EQ(EVP_DigestSign(context.get(), reinterpret_cast<unsigned char*>(signature.data()), &size,
                             reinterpret_cast<const unsigned char*>(text.data()), text.size()),
              1);
    return to_hex(signature);
  };
  const auto fetch = [&](const std::string& text, const std::string& signature) {
    return client.post("/api/auth/node-token", "",
                       {{"public_key", public_key}, {"nonce", text}, {"signature", signature}});
  };
  std::string text = nonce();
  EXPECT_EQ(fetch(text, sign(text)).status, 403);  // not admitted
  ASSERT_TRUE(hub.hub->store().put_key({public_key, Scope::kWorker, "", unix_now(), std::nullopt}));
  EXPECT_EQ(fetch(text, sign(text)).status, 401);  // used up
  text = nonce();
  EXPECT_EQ(fetch(text, sign("kvasir-node-token:something else")).status, 401);
  text = nonce();
  const Reply good = fetch(text, sign(text));
  ASSERT_EQ(good.status, 200) << good.body;
  EXPECT_EQ(client.get("/api/models", good.json()["token"].get<std::string>()).status, 200);
  ASSERT_TRUE(*hub.hub->store().revoke_key(public_key, unix_now()));
  text = nonce();
  EXPECT_EQ(fetch(text, sign(text)).status, 403);
  for (const json& wrong : {json::object(), json{{"public_key", "zz"}}, json{{"public_key", std::string(62, 'a')}}})
    EXPECT_EQ(client.post("/api/auth/challenge", "", wrong).status, 400);
}

TEST(Api, TheLedgerKeepsBothSides) {
  TestHub hub(closed_group());
  TestClient client = hub.client();
  const json report = {{"report_id", "r1"},
                       {"entries", {{{"worker_id", "w"}, {"pairs", 10}, {"rows", 5}, {"bytes", 1000}}}}};
  EXPECT_EQ(client.post("/api/contributions", hub.backbone, report).json()["repeated"], false);
  EXPECT_EQ(client.post("/api/contributions", hub.backbone, report).json()["repeated"], true);
  EXPECT_EQ(client.post("/api/contributions", hub.worker, report).json()["repeated"], false);  // the same id of another
  const json all = client.get("/api/contributions", hub.admin).json()["entries"];
  ASSERT_EQ(all.size(), 2u);
  EXPECT_NE(all[0]["side"], all[1]["side"]);
  EXPECT_EQ(all[0]["pairs"], 10);
  // Another node sees nothing of it, and cannot report for it.
  const std::string other = hub.token(Scope::kWorker);
  EXPECT_TRUE(client.get("/api/contributions", other).json()["entries"].empty());
  EXPECT_EQ(client.post("/api/contributions", other, report).status, 403);
  EXPECT_EQ(client.get("/api/contributions", hub.worker).json()["entries"].size(), 2u);
}

// A backbone that reports too little itself.
TEST(Api, AQuotaIsUsedUpByWhatWorkersSayToo) {
  TestHub hub(closed_group());
  NewToken limited = make_token(Scope::kBackbone, "", std::nullopt, unix_now());
  limited.record.pairs_per_day = 100;
  ASSERT_TRUE(hub.hub->store().put_token(limited.record));
  const std::string& id = limited.record.id;
  TestClient client = hub.client();
  const json beat = {{"worker_id", "laptop"}, {"model", "seed"}, {"n_layer", 1}, {"n_expert", 4}, {"segments", {{0, 0, 4}}}, {"url", "192.0.2.1:7000"}};
  EXPECT_EQ(client.post("/api/expert-coverage", hub.worker, beat).status, 200);
  const auto n_workers = [&] { return client.get("/api/expert-routes", limited.text).json()["workers"].size(); };
  const auto report = [&](const std::string& token, const json& entry) {
    EXPECT_EQ(client.post("/api/contributions", token, {{"entries", {entry}}}).status, 200);
  };
  report(limited.text, {{"worker_id", "laptop"}, {"pairs", 10}});
  report(hub.worker, {{"worker_id", "laptop"}, {"pairs", 60}, {"rows", 6}, {"bytes", 600}, {"backbone", id}});
  report(hub.worker, {{"worker_id", "laptop"}, {"pairs", 1000}});                              // of somebody without a name
  report(hub.worker, {{"worker_id", "laptop"}, {"pairs", 1000}, {"backbone", "nobody's id"}});  // of nobody
  EXPECT_EQ(n_workers(), 1u);
  report(hub.worker, {{"worker_id", "laptop"}, {"pairs", 40}, {"backbone", id}});
  EXPECT_EQ(n_workers(), 0u);
  // All words are kept.
  std::map<std::string, std::int64_t> pairs;
  const json all = client.get("/api/contributions", hub.admin).json();
  for (const json& entry : all["entries"]) {
    pairs[entry["side"]] += entry["pairs"].get<std::int64_t>();
    EXPECT_TRUE(entry["side"] != "served_to" || entry["reporter"] == id);
  }
  EXPECT_EQ(pairs["backbone"], 10);
  EXPECT_EQ(pairs["worker"], 2100);
  EXPECT_EQ(pairs["served_to"], 100);
}

TEST(Api, BansHold) {
  TestHub hub(closed_group());
  TestClient client = hub.client();
  const json body = {{"worker_id", "w"}, {"model", "m"}, {"segments", {{0, 0, 4}}}, {"url", "192.0.2.1:7000"}};
  EXPECT_EQ(client.post("/api/expert-coverage", hub.worker, body).status, 200);
  EXPECT_EQ(client.get("/api/admin/nodes", hub.admin).json()["nodes"].size(), 1u);
  EXPECT_EQ(client.post("/api/admin/ban", hub.admin, {{"worker_id", "w"}, {"reason", "wrong answers"}}).status, 200);
  EXPECT_TRUE(client.get("/api/admin/nodes", hub.admin).json()["nodes"].empty());
  EXPECT_EQ(client.post("/api/expert-coverage", hub.worker, body).status, 403);
  const json bans = client.get("/api/admin/bans", hub.admin).json()["bans"];
  ASSERT_EQ(bans.size(), 1u);
  EXPECT_EQ(bans[0]["worker_id"], "w");
  EXPECT_EQ(bans[0]["reason"], "wrong answers");
  EXPECT_EQ(client.post("/api/admin/unban", hub.admin, {{"worker_id", "w"}}).json()["known"], true);
  EXPECT_EQ(client.post("/api/expert-coverage", hub.worker, body).status, 200);
  EXPECT_EQ(client.post("/api/admin/evict", hub.admin, {{"worker_id", "w"}}).json()["known"], true);
  EXPECT_TRUE(client.get("/api/admin/nodes", hub.admin).json()["nodes"].empty());
}

TEST(Api, GrantsNameTheBackboneTheWorkerAndTheModel) {
  TestHub hub(closed_group());
  TestClient client = hub.client();
  const json beat = {{"worker_id", "laptop"}, {"model", "seed"}, {"n_layer", 1}, {"n_expert", 4}, {"segments", {{0, 0, 4}}}, {"url", "192.0.2.1:7000"}};
  EXPECT_EQ(client.post("/api/expert-coverage", hub.worker, beat).status, 200);
  const auto key = net::SigningKey::make().value();
  const json ask = {{"public_key", to_hex(ByteSpan(key.public_key()))}, {"workers", {"laptop", "nobody"}}};
  const json answer = client.post("/api/expert-grants", hub.backbone, ask).json();
  ASSERT_EQ(answer["grants"].size(), 1u) << answer;
  const net::Binding binding{};
  const std::string token = net::prove_grant(answer["grants"]["laptop"].get<std::string>(), key, binding);
  net::PublicKey hub_key{};
  std::ranges::copy(*from_hex(client.get("/api/grant-key", "").json()["public_key"].get<std::string>()), hub_key.begin());
  const auto grant = net::check_grant(token, hub_key, "laptop", binding, static_cast<std::uint64_t>(unix_now()));
  ASSERT_TRUE(grant) << grant.error().message;
  EXPECT_EQ(grant->model, "seed");
  EXPECT_TRUE(hub.backbone.contains(grant->backbone));
  EXPECT_EQ(client.post("/api/expert-grants", hub.worker, ask).status, 403);
  client.connect();
  EXPECT_EQ(client.post("/api/expert-grants", hub.backbone, {{"public_key", "00"}, {"workers", json::array()}}).status, 400);
}

// Walks the description: every route in it is there, asks for a token where it says so, takes
// its own example, and answers with the fields of its example; and it leaves no route out.
TEST(Api, TheDescriptionIsTrue) {
  TestHub hub(closed_group());
  hub.wait_ready();
  TestClient client = hub.client();
  const json document = client.get("/api/openapi.json", "").json();
  std::size_t n = 0;
  for (const auto& [pattern, operations] : document["paths"].items())
    for (const auto& [method, operation] : operations.items()) {
      ++n;
      std::string target = pattern;
      if (const std::size_t at = target.find("{m}"); at != std::string::npos) target.replace(at, 3, "m");
      if (target.ends_with("expert-shard")) target += "?layers=0:1&experts=0:1";
      const std::string verb = method == "post" ? "POST" : "GET";
      const json example = operation.contains("requestBody")
                               ? operation["requestBody"]["content"]["application/json"]["example"]
                               : json();
      const std::string body = example.is_null() ? "" : example.dump();
      client.connect();
      client.send(TestClient::request(verb, target, "", body));
      Reply reply = client.receive();
      if (operation.contains("security")) {
        EXPECT_EQ(reply.status, 401) << pattern;
        client.connect();
        client.send(TestClient::request(verb, target, hub.admin, body));
        reply = client.receive();
      }
      EXPECT_NE(reply.status, 401) << pattern;
      EXPECT_NE(reply.status, 405) << pattern;
      EXPECT_LT(reply.status, 500) << pattern << reply.body;
      if (reply.status == 404) {
        EXPECT_EQ(reply.error().find("nothing at this address"), std::string::npos) << pattern;
      }
      const json& answer = operation["responses"]["200"]["content"];
      if (reply.status == 200 && answer.contains("application/json")) {
        for (const auto& [name, value] : reply.json().items())
          EXPECT_TRUE(answer["application/json"]["example"].contains(name) || pattern == "/api/openapi.json")
              << pattern << " answers with an undescribed '" << name << "'";
      }
    }
  EXPECT_EQ(n, hub.hub->router().routes().size());
}

}  // namespace
}  // namespace kvasir::hub
