// For tests: a hub with a small model, listening on loopback.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <format>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "gguf/synth.h"
#include "hub/http/hub.h"
#include "hub/http/server.h"
#include "hub/http/test_client.h"

namespace kvasir::hub {

class TestHub {
 public:
  struct Options {
    MarketOptions market{};
    ServerOptions server{};
    bool no_proof = false;
    bool nodes_were_here = false;  // before a restart, a moment ago
    bool public_view = false;
    std::uint64_t grant_life_s = net::kGrantLife_s;
    // Of several that share a store: their PostgreSQL, and the port at which others find this one.
    std::string store_url{};
    std::uint16_t port = 0;
  };

  explicit TestHub(Options options) {
    char folder[] = "/tmp/kvasir-hub-XXXXXX";
    EXPECT_NE(::mkdtemp(folder), nullptr);
    top = folder;
    std::filesystem::create_directories(top / "models");
    std::filesystem::create_directories(top / "data");
    write_model("m", 1);
    if (options.nodes_were_here) std::ofstream(top / "data" / "nodes-seen") << unix_now() << '\n';
    HubOptions hub_options;
    hub_options.data_dir = top / "data";
    hub_options.models_dir = top / "models";
    hub_options.market = options.market;
    hub_options.market.proof = !options.no_proof;
    hub_options.version = "test";
    hub_options.public_view = options.public_view;
    hub_options.grant_life_s = options.grant_life_s;
    const auto log = [this](const std::string& line) {
      const MutexLock lock(mutex);
      lines.push_back(line);
    };
    std::unique_ptr<Store> store = make_memory_store();
    if (!options.store_url.empty()) {
      auto opened = open_postgres_store(options.store_url);
      EXPECT_TRUE(opened) << opened.error().message;
      store = *std::move(opened);
      hub_options.public_url = std::format("http://127.0.0.1:{}", options.port);
    }
    auto made = Hub::create(hub_options, std::move(store), log);
    EXPECT_TRUE(made) << made.error().message;
    hub = *std::move(made);
    options.server.listen = {"127.0.0.1", options.port};
    auto started = Server::start(options.server, hub->router(), hub->authenticator(), hub->relay_host(), log);
    EXPECT_TRUE(started) << started.error().message;
    server = *std::move(started);
    worker = token(Scope::kWorker);
    backbone = token(Scope::kBackbone);
    admin = token(Scope::kAdmin);
  }
  TestHub() : TestHub(Options{}) {}
  ~TestHub() {
    server.reset();
    hub.reset();
    std::filesystem::remove_all(top);
  }

  // 2 layers of 8 experts, about 100 kB an expert.
  void write_model(const std::string& name, std::uint64_t seed) const {
    gguf::SynthOptions synth;
    synth.seed = seed;
    const auto path = top / "models" / (name + ".gguf");
    EXPECT_TRUE(gguf::write_synthetic(synth, path.string() + ".new"));
    std::filesystem::rename(path.string() + ".new", path);
  }

  std::string token(Scope scope, std::optional<UnixSeconds> expires = std::nullopt) const {
    const NewToken made = make_token(scope, "", expires, unix_now());
    EXPECT_TRUE(hub->store().put_token(made.record));
    return made.text;
  }

  void wait_ready() const {
    for (int i = 0; i < 1000 && !hub->catalogue().find("m")->ready(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_TRUE(hub->catalogue().find("m")->ready());
  }
  TestClient client() const { return TestClient(server->port()); }
  std::string log_text() {
    const MutexLock lock(mutex);
    std::string out;
    for (const std::string& line : lines) out += line + "\n";
    return out;
  }

  std::filesystem::path top;
  Mutex mutex;
  std::vector<std::string> lines;
  std::unique_ptr<Hub> hub;
  std::unique_ptr<Server> server;
  std::string worker, backbone, admin;
};

}  // namespace kvasir::hub
