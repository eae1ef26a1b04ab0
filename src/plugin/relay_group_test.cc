// Several hubs over one PostgreSQL: a worker waits at one of them, and a backbone asks another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dispatch/dispatcher.h"
#include "hub/http/test_hub.h"
#include "hub/store/postgres_server.h"
#include "worker/relay_listener.h"
#include "worker/testing.h"

namespace kvasir::plugin {
namespace {

using namespace std::chrono_literals;
using hub::TestHub;
using ::testing::HasSubstr;

class RelayGroup : public ::testing::Test {
 protected:
  void SetUp() override {
    auto started = hub::PostgresServer::start();
    if (!started) GTEST_SKIP() << started.error().message;
    postgres_ = *std::move(started);
    for (auto* hub : {&a_, &b_}) {
      TestHub::Options options;
      options.server.relay.answer_wait = 500ms;
      options.store_url = postgres_->url();
      options.port = net::listen_on({"127.0.0.1", 0})->port;  // free a moment ago
      *hub = std::make_unique<TestHub>(options);
    }
    testing_files_ = {(a_->top / "models" / "m.gguf").string()};
    store_ = std::make_unique<worker::SliceStore>(worker::testing::load(testing_files_));
    worker_ = std::make_unique<worker::testing::TestServer>(testing_files_);
  }
  static std::string url(const TestHub& hub) { return std::format("http://127.0.0.1:{}", hub.server->port()); }

  std::unique_ptr<worker::RelayListener> wait_at(const TestHub& hub) {
    worker::RelayListenerOptions options{
        .dialer = *net::RelayDialer::create({.url = url(hub), .token = a_->worker, .ca_file = {}}),
        .session = "laptop",
        .tls = *net::TlsContext::server(identity_),
        .accept = [this](std::unique_ptr<net::Stream> stream,
                         std::string peer) { worker_->adopt(std::move(stream), std::move(peer)); },
        .log = [](const std::string&) {}};
    return std::make_unique<worker::RelayListener>(std::move(options));
  }
  static bool waits(const TestHub& hub) {
    return wait_for([&] { return hub.server->stats().relay.waiting > 0; });
  }
  template <typename Done>
  static bool wait_for(Done&& done) {
    for (const auto begin = monotonic_now(); monotonic_now() - begin < 30s; std::this_thread::sleep_for(5ms))
      if (done()) return true;
    return false;
  }
  // A backbone that knows one hub.
  std::unique_ptr<dispatch::Dispatcher> backbone(const TestHub& hub) {
    dispatch::Options options;
    dispatch::WorkerAddress where;
    where.relay = "laptop";
    where.fingerprint = net::format_fingerprint(identity_.fingerprint);
    options.workers = {where};
    options.relay = net::RelayOptions{.url = url(hub), .token = a_->backbone, .ca_file = {}};
    options.numerics = wire::Numerics::kFast;
    options.connect_wait = 0s;
    options.log = [](const std::string&) {};
    auto out = *dispatch::Dispatcher::create(std::move(options));
    layer_ = &out->register_layer(held().layer_id, 0, *worker::plain_swiglu_recipe(held()));
    return out;
  }
  bool answers(dispatch::Dispatcher& dispatcher) {
    const auto driver = dispatcher.make_driver();
    const std::uint32_t width = held().n_embd;
    const std::vector<float> row = worker::testing::random_rows(width, 1);
    std::vector<float> out(2 * width);
    const std::vector<wire::Pair> pairs = {{0, 1}, {0, 5}};
    return wait_for([&] {
      const std::uint64_t before = dispatcher.stats().pairs_remote;
      const dispatch::Round round{
          .layer = layer_, .rows = row.data(), .row_stride = width, .n_rows = 1, .pairs = pairs, .out = out.data()};
      EXPECT_TRUE(driver->run(round, [](const dispatch::Round&, std::span<const std::uint32_t>) { return Status{}; }));
      return dispatcher.stats().pairs_remote > before;
    });
  }
  const worker::HeldLayer& held() const { return *store_->layers()[0]; }

  std::unique_ptr<hub::PostgresServer> postgres_;
  std::unique_ptr<TestHub> a_, b_;
  const net::TlsIdentity identity_ = net::make_tls_identity().value();
  std::vector<std::string> testing_files_;
  std::unique_ptr<worker::SliceStore> store_;
  std::unique_ptr<worker::testing::TestServer> worker_;
  const dispatch::Layer* layer_ = nullptr;
};

TEST_F(RelayGroup, ABackboneIsSentToTheHubWhereItsWorkerWaits) {
  const auto listener = wait_at(*a_);
  ASSERT_TRUE(waits(*a_));
  // What the other hub says, and where it points.
  const auto dialer = *net::RelayDialer::create({.url = url(*b_), .token = b_->backbone, .ca_file = {}});
  const auto socket = *dialer.open(*net::connect_to(dialer.dial_address(), 5s), "laptop");
  std::string said;
  ASSERT_TRUE(wait_for([&] {
    const auto open = socket->is_open();
    if (!open) said = open.error().message;
    return !open;
  }));
  EXPECT_THAT(said, HasSubstr("waits at another hub, " + url(*a_)));
  EXPECT_EQ(socket->moved_to(), url(*a_));
  // A backbone goes there by itself.
  const auto there = backbone(*b_);
  EXPECT_TRUE(answers(*there));
  EXPECT_GT(a_->server->stats().relay.bytes, 0u);
  EXPECT_EQ(b_->server->stats().relay.bytes, 0u);
}

// It was sent to where the worker had been before.
TEST_F(RelayGroup, AWorkerThatMovedIsFoundWhereItIsNow) {
  {
    const auto listener = wait_at(*a_);
    ASSERT_TRUE(waits(*a_));
  }
  ASSERT_TRUE(wait_for([&] { return a_->server->stats().relay.waiting == 0; }));
  const auto listener = wait_at(*b_);
  ASSERT_TRUE(waits(*b_));
  const auto from_a = backbone(*a_);
  EXPECT_TRUE(answers(*from_a));
  const auto from_b = backbone(*b_);
  EXPECT_TRUE(answers(*from_b));
  EXPECT_EQ(a_->server->stats().relay.bytes, 0u);
}

}  // namespace
}  // namespace kvasir::plugin
