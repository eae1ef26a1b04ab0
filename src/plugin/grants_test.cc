// Session grants all the way: a real hub, its follower, the dispatcher, and a real worker whose
// door opens over TLS to grants of that hub and to its ticket.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "hub/http/test_hub.h"
#include "plugin/hub_follower.h"
#include "worker/testing.h"

namespace kvasir::plugin {
namespace {

using namespace std::chrono_literals;
using hub::TestHub;
using nlohmann::json;
using ::testing::HasSubstr;

constexpr char kTicket[] = "the ticket";

class PluginGrants : public ::testing::Test {
 protected:
  static TestHub::Options options(std::uint64_t life_s) {
    TestHub::Options out;
    out.no_proof = true;
    out.grant_life_s = life_s;
    out.server.wait_max = 200ms;
    return out;
  }

  explicit PluginGrants(std::uint64_t life_s = net::kGrantLife_s) : hub_(options(life_s)) {
    hub_.wait_ready();
    store_ = std::make_unique<worker::SliceStore>(worker::testing::load({model()}));
  }
  ~PluginGrants() override {
    follower_.reset();
    driver_.reset();
    dispatcher_.reset();
  }

  std::string model() const { return (hub_.top / "models" / "m.gguf").string(); }

  // A worker that takes grants which `signer` made for `id`.
  void start_worker(const net::PublicKey& signer, const std::string& id = "laptop") {
    worker::ServerOptions options;
    options.tls = net::TlsContext::server(identity_).value();
    options.token = kTicket;
    options.grants = worker::GrantCheck{.hub = signer, .worker_id = id};
    worker_ = std::make_unique<worker::testing::TestServer>(std::vector{model()}, options);
  }
  dispatch::WorkerAddress address(const std::string& ticket) const {
    dispatch::WorkerAddress out;
    out.host = "127.0.0.1";
    out.port = worker_->port();
    out.fingerprint = net::format_fingerprint(identity_.fingerprint);
    out.id = "laptop";
    out.token = ticket;
    return out;
  }
  void announce(const std::string& ticket) {
    const json beat = {{"worker_id", "laptop"},
                       {"model", "m"},
                       {"segments", {{0, 0, 8}}},
                       {"url", std::format("127.0.0.1:{}", worker_->port())},
                       {"fingerprint", net::format_fingerprint(identity_.fingerprint)},
                       {"ticket", ticket}};
    EXPECT_EQ(hub_.client().post("/api/expert-coverage", hub_.worker, beat).status, 200);
  }

  std::function<void(std::string)> log() {
    return [this](std::string line) {
      const std::lock_guard lock(mutex_);
      lines_ += line + "\n";
    };
  }
  std::string lines() {
    const std::lock_guard lock(mutex_);
    return lines_;
  }
  void make_dispatcher(dispatch::GrantSource grants) {
    dispatch::Options options;
    options.workers_follow = true;
    options.numerics = wire::Numerics::kFast;
    options.grants = std::move(grants);
    options.connect_wait = 0s;
    options.log = log();
    dispatcher_ = *dispatch::Dispatcher::create(std::move(options));
    layer_ = &dispatcher_->register_layer(held().layer_id, 0, *worker::plain_swiglu_recipe(held()));
    driver_ = dispatcher_->make_driver();
  }
  // As the plugin does it.
  void follow() {
    grants_ = *SessionGrants::make();
    make_dispatcher(grants_->source());
    const hub::HubAddress address{std::format("http://127.0.0.1:{}", hub_.server->port()), hub_.backbone, ""};
    follower_ = *HubFollower::start({.hub = address, .grants = grants_, .log = log()}, *dispatcher_);
    follower_->add_layer(held().layer_id);
  }
  const worker::HeldLayer& held() const { return *store_->layers()[0]; }

  // Runs rounds until one was answered by the worker.
  bool answers() {
    const std::uint32_t width = held().n_embd;
    const std::vector<float> row = worker::testing::random_rows(width, 1);
    std::vector<float> out(2 * width);
    const std::vector<wire::Pair> pairs = {{0, 1}, {0, 5}};
    return wait_for([&] {
      const std::uint64_t before = dispatcher_->stats().pairs_remote;
      const dispatch::Round round{
          .layer = layer_, .rows = row.data(), .row_stride = width, .n_rows = 1, .pairs = pairs, .out = out.data()};
      EXPECT_TRUE(driver_->run(round, [](const dispatch::Round&, std::span<const std::uint32_t>) { return Status{}; }));
      return dispatcher_->stats().pairs_remote > before;
    });
  }
  bool logs(std::string_view text) {
    return wait_for([&] { return lines().contains(text); });
  }
  template <typename Done>
  static bool wait_for(Done&& done) {
    for (const auto begin = monotonic_now(); monotonic_now() - begin < 30s; std::this_thread::sleep_for(5ms))
      if (done()) return true;
    return false;
  }

  // The hub's word on `worker`, for the key of some backbone.
  std::string signed_grant(const net::PublicKey& backbone, const std::string& worker = "laptop",
                           std::int64_t for_s = 600) const {
    return *net::sign_grant({.backbone = "b",
                             .worker = worker,
                             .model = "m",
                             .expires_unix_s = static_cast<std::uint64_t>(hub::unix_now() + for_s),
                             .backbone_key = backbone},
                            hub_.hub->grant_key());
  }
  // A backbone that shows this grant, and when it is refused the ticket.
  void show(const std::string& grant, const std::string& ticket) {
    start_worker(hub_.hub->grant_key().public_key());
    const auto refused = std::make_shared<std::atomic<bool>>(false);
    make_dispatcher({.key = key_,
                     .find = [=](const std::string&) { return *refused ? std::string() : grant; },
                     .refused = [=](const std::string&) { *refused = true; }});
    dispatcher_->set_workers({address(ticket)});
  }

  TestHub hub_;
  const net::TlsIdentity identity_ = net::make_tls_identity().value();
  const net::SigningKey key_ = net::SigningKey::make().value();
  std::unique_ptr<worker::SliceStore> store_;
  std::unique_ptr<worker::testing::TestServer> worker_;
  std::mutex mutex_;
  std::string lines_;
  std::shared_ptr<SessionGrants> grants_;
  std::unique_ptr<dispatch::Dispatcher> dispatcher_;
  std::unique_ptr<dispatch::RoundDriver> driver_;
  std::unique_ptr<HubFollower> follower_;
  const dispatch::Layer* layer_ = nullptr;
};

TEST_F(PluginGrants, OpenTheDoorWithoutATicket) {
  start_worker(hub_.hub->grant_key().public_key());
  announce("not the ticket");
  follow();
  EXPECT_TRUE(answers()) << lines();
}

TEST_F(PluginGrants, AWorkerThatRefusesThemIsShownItsTicket) {
  start_worker(key_.public_key());  // it knows another hub's key
  announce(kTicket);
  follow();
  EXPECT_TRUE(answers()) << lines();
  EXPECT_THAT(lines(), HasSubstr("refuses the session grant"));
  EXPECT_EQ(grants_->find("laptop", monotonic_now()), "");
}

// A hub before grants, or one that has none to give.
TEST_F(PluginGrants, WithoutThemTheTicketOpens) {
  start_worker(hub_.hub->grant_key().public_key());
  make_dispatcher({.key = key_, .find = [](const std::string&) { return std::string(); }});
  dispatcher_->set_workers({address(kTicket)});
  EXPECT_TRUE(answers()) << lines();
}

TEST_F(PluginGrants, AnExpiredOneIsRefused) {
  show(signed_grant(key_.public_key(), "laptop", -1000), "not the ticket");
  EXPECT_TRUE(logs("expired")) << lines();
  EXPECT_TRUE(logs("cannot be used")) << lines();  // nor does the wrong ticket open
  EXPECT_EQ(dispatcher_->stats().workers_up, 0u);
}

// Copied from another backbone: the proof over this connection is wrong.
TEST_F(PluginGrants, AnotherBackbonesIsRefused) {
  show(signed_grant(net::SigningKey::make().value().public_key()), "not the ticket");
  EXPECT_TRUE(logs("somebody else")) << lines();
  EXPECT_EQ(dispatcher_->stats().workers_up, 0u);
}

// The whole token of an earlier connection, as somebody who reads along would show it.
TEST_F(PluginGrants, AReplayedOneIsRefused) {
  net::Binding earlier{};
  earlier[0] = std::byte{1};
  show(net::prove_grant(signed_grant(key_.public_key()), key_, earlier), "not the ticket");
  EXPECT_TRUE(logs("refuses the session grant")) << lines();
  EXPECT_EQ(dispatcher_->stats().workers_up, 0u);
}

TEST_F(PluginGrants, AnotherWorkersIsRefusedAndTheTicketOpens) {
  show(signed_grant(key_.public_key(), "desktop"), kTicket);
  EXPECT_TRUE(answers()) << lines();
  EXPECT_THAT(lines(), HasSubstr("another worker"));
}

class ShortGrants : public PluginGrants {
 protected:
  ShortGrants() : PluginGrants(2) {}
};

TEST_F(ShortGrants, AreRenewedBeforeTheyExpire) {
  start_worker(hub_.hub->grant_key().public_key());
  announce("not the ticket");
  follow();
  std::string first, second;
  ASSERT_TRUE(wait_for([&] { return !(first = grants_->find("laptop", monotonic_now())).empty(); }));
  EXPECT_TRUE(wait_for([&] {
    second = grants_->find("laptop", monotonic_now());
    return !second.empty() && second != first;
  }));
}

// The hub is away for longer than they last: none is shown any more, and it is said once.
TEST_F(ShortGrants, ExpireAndAreSaidToBeMissing) {
  const hub::HubAddress address{std::format("http://127.0.0.1:{}", hub_.server->port()), hub_.backbone, ""};
  start_worker(hub_.hub->grant_key().public_key());
  announce(kTicket);
  const auto grants = *SessionGrants::make();
  const auto client = *hub::HubClient::create(address);
  const TimePoint now = monotonic_now();
  ASSERT_TRUE(grants->renew(*client, {"laptop"}, now));
  EXPECT_TRUE(net::is_grant(grants->find("laptop", now)));
  hub_.server->stop(Nanos::zero());
  const auto away = grants->renew(*client, {"laptop"}, now + 1500ms);
  ASSERT_FALSE(away);
  EXPECT_THAT(away.error().message, HasSubstr("tickets instead"));
  EXPECT_TRUE(grants->renew(*client, {"laptop"}, now + 60s));  // said already
  EXPECT_TRUE(net::is_grant(grants->find("laptop", now + 1500ms)));
  EXPECT_EQ(grants->find("laptop", now + 3s), "");
}

}  // namespace
}  // namespace kvasir::plugin
