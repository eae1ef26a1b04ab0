// Requests of several backbones in one computation: what is computed together is seen by the engine.
#include "worker/merge.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <numeric>

#include "worker/testing.h"

namespace kvasir::worker {
namespace {

using testing::random_rows;
using testing::TestClient;
using testing::TestServer;
using wire::ErrorCode;
using wire::FrameType;
using wire::Numerics;
using wire::Pair;

constexpr std::uint32_t kWidth = 256;
constexpr std::chrono::seconds kPatience{20};

// The real engine, which waits to be let on at each call and keeps how many pairs it was given.
class Watched final : public ffn::Engine {
 public:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::size_t> calls;  // pairs of each
    std::size_t let = 0;             // calls that may go on
    bool fail = false;
    void let_on(std::size_t n) {
      const std::lock_guard lock(mutex);
      let += n;
      changed.notify_all();
    }
    bool wait_for_calls(std::size_t n) {
      std::unique_lock lock(mutex);
      return changed.wait_for(lock, kPatience, [&] { return calls.size() >= n; });
    }
  };
  explicit Watched(std::shared_ptr<State> state) : inner_(ffn::Engine::create({}).value()), state_(std::move(state)) {}

  Status compute(const wire::Recipe& recipe, const ffn::ExpertTensors& tensors, ffn::RowsView rows,
                 std::span<const ffn::LocalPair> pairs, float* out) override {
    return compute(Numerics::kExact, recipe, tensors, rows, pairs, out);
  }
  Status compute(Numerics numerics, const wire::Recipe& recipe, const ffn::ExpertTensors& tensors, ffn::RowsView rows,
                 std::span<const ffn::LocalPair> pairs, float* out) override {
    KVASIR_TRY(begin(pairs.size()));
    return inner_->compute(numerics, recipe, tensors, rows, pairs, out);
  }
  Status compute_fast(const wire::Recipe& recipe, std::span<const ffn::ExpertTensors> copies, ffn::RowsView rows,
                      std::span<const ffn::LocalPair> pairs, float* out) override {
    KVASIR_TRY(begin(pairs.size()));
    return inner_->compute_fast(recipe, copies, rows, pairs, out);
  }
  void set_fast_plans(const ffn::FastPlans& plans) override { inner_->set_fast_plans(plans); }
  void forget_graphs() override { inner_->forget_graphs(); }
  void set_n_threads(int n) override { inner_->set_n_threads(n); }

 private:
  Status begin(std::size_t n_pairs) {
    std::unique_lock lock(state_->mutex);
    state_->calls.push_back(n_pairs);
    state_->changed.notify_all();
    const std::size_t call = state_->calls.size();
    EXPECT_TRUE(state_->changed.wait_for(lock, kPatience, [&] { return state_->let >= call; }));
    if (state_->fail) return fatal("the device is gone.");
    return {};
  }
  std::unique_ptr<ffn::Engine> inner_;
  std::shared_ptr<State> state_;
};

struct Request {
  std::vector<float> rows;
  std::vector<Pair> pairs;
  std::vector<float> weights{};  // sums are wanted
  std::uint32_t layer = 0;
};

// `n_rows` rows, each through `top_k` of the experts, all different from those of another seed.
Request request(std::uint32_t n_rows, std::uint32_t seed, std::uint32_t top_k = 4) {
  Request made{.rows = random_rows(std::size_t{n_rows} * kWidth, seed), .pairs = {}};
  for (std::uint32_t row = 0; row < n_rows; ++row)
    for (std::uint32_t k = 0; k < top_k; ++k) made.pairs.push_back({row, (seed + row + k) % 8});
  return made;
}

class MergeTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = new testing::TempDir;
    testing::make_model(*dir_ / "model.gguf", {});
    store_ = new SliceStore(testing::load({*dir_ / "model.gguf"}));
  }
  static void TearDownTestSuite() {
    delete store_;
    delete dir_;
  }

  void start(ServerOptions options = {}) {
    server_ = std::make_unique<TestServer>(std::vector<std::string>{*dir_ / "model.gguf"}, options, std::make_unique<Watched>(state_));
    control_ = connect();
    plug_ = connect();
  }
  void TearDown() override {
    state_->let_on(1000);
    server_.reset();
  }
  std::unique_ptr<TestClient> connect() {
    auto client = std::make_unique<TestClient>(server_->port());
    client->greet();
    for (std::uint32_t layer : {0u, 1u}) {
      const HeldLayer& held = *store_->layers()[layer];
      client->bind(layer, held.layer_id, *plain_swiglu_recipe(held));
    }
    return client;
  }
  static void send(TestClient& client, std::uint64_t id, Numerics numerics, const Request& what) {
    const wire::ExecHead head{.recipe_id = what.layer,
                              .numerics = numerics,
                              .result_kind = what.weights.empty() ? wire::ResultKind::kPerPair : wire::ResultKind::kWeightedSum,
                              .n_rows = static_cast<std::uint32_t>(what.rows.size() / kWidth),
                              .n_pairs = static_cast<std::uint32_t>(what.pairs.size()),
                              .n_embd = kWidth};
    client.send_exec(id, head, what.pairs, what.rows, what.weights);
  }
  // Until so many requests wait in the line.
  void wait_for_line(std::uint32_t n) {
    const TimePoint deadline = monotonic_now() + kPatience;
    for (std::uint64_t id = 1; monotonic_now() < deadline; ++id) {
      control_->send(FrameType::kPing, id, wire::Ping{.sent_ns = id});
      ASSERT_TRUE(control_->next());
      if (wire::decode_pong(control_->payload())->queued == n) return;
    }
    FAIL() << "the line never had " << n;
  }
  // Keeps the engine busy, so that what is sent from now on waits in the line.
  void hold() {
    send(*plug_, ++plug_id_, Numerics::kFast, request(1, 99, 1));
    ASSERT_TRUE(state_->wait_for_calls(calls() + 1));
  }
  std::size_t calls() {
    const std::lock_guard lock(state_->mutex);
    return state_->let;  // all of them are over, between two holds
  }
  std::vector<std::size_t> calls_since(std::size_t n) {
    const std::lock_guard lock(state_->mutex);
    return {state_->calls.begin() + static_cast<std::ptrdiff_t>(n), state_->calls.end()};
  }
  // The answers to requests that wait together, sent in that order while the engine is busy.
  std::vector<std::vector<float>> together(Numerics numerics, const std::vector<Request>& requests, const std::vector<std::size_t>& order,
                                           std::size_t n_calls) {
    hold();
    std::vector<std::unique_ptr<TestClient>> clients;
    for (std::size_t i = 0; i < requests.size(); ++i) clients.push_back(connect());
    for (std::size_t k = 0; k < order.size(); ++k) {
      send(*clients[order[k]], 7, numerics, requests[order[k]]);
      wait_for_line(static_cast<std::uint32_t>(k + 1));
    }
    state_->let_on(1 + n_calls);
    std::vector<std::vector<float>> answers(requests.size());
    for (std::size_t i : order) answers[i] = clients[i]->result(7);
    plug_->result(plug_id_);
    return answers;
  }
  std::vector<float> alone(Numerics numerics, const Request& what) {
    const auto client = connect();
    state_->let_on(1);
    send(*client, 7, numerics, what);
    return client->result(7);
  }

  static testing::TempDir* dir_;
  static SliceStore* store_;
  std::shared_ptr<Watched::State> state_ = std::make_shared<Watched::State>();
  std::unique_ptr<TestServer> server_;
  std::unique_ptr<TestClient> control_, plug_;
  std::uint64_t plug_id_ = 1000;
};
testing::TempDir* MergeTest::dir_ = nullptr;
SliceStore* MergeTest::store_ = nullptr;

// With the rows of all three an expert has more than the 7 rows up to which its kernel keeps the
// bits of a row alone.
TEST_F(MergeTest, InvariantResultsDoNotDependOnWhatSharesTheBatch) {
  start();
  const std::vector<Request> requests = {request(1, 1), request(9, 2), request(6, 3)};
  std::vector<std::vector<float>> separate;
  for (const Request& what : requests) separate.push_back(alone(Numerics::kInvariant, what));
  // Each row of them as if it were the only one.
  for (std::size_t r = 0; r < requests.size(); ++r)
    for (std::size_t i = 0; i < requests[r].pairs.size(); i += 3) {
      const Pair pair = requests[r].pairs[i];
      const auto row = requests[r].rows.begin() + pair.row * kWidth;
      const std::vector<float> single = alone(Numerics::kInvariant, {.rows = {row, row + kWidth}, .pairs = {{0, pair.expert}}});
      EXPECT_TRUE(std::equal(single.begin(), single.end(), separate[r].begin() + static_cast<std::ptrdiff_t>(i * kWidth)));
    }
  std::vector<std::size_t> order = {0, 1, 2};
  std::uint64_t merged = 0;
  do {
    const std::size_t before = calls();
    EXPECT_EQ(together(Numerics::kInvariant, requests, order, 1), separate) << "order " << order[0] << order[1] << order[2];
    EXPECT_EQ(calls_since(before), (std::vector<std::size_t>{1, 64}));
    EXPECT_EQ(server_->stats().requests_merged, merged += 2);
  } while (std::ranges::next_permutation(order).found);
  for (const std::vector<std::size_t>& two : {std::vector<std::size_t>{2, 0}, {0, 1}}) {
    const std::vector<std::vector<float>> answers = together(Numerics::kInvariant, requests, two, 1);
    for (std::size_t i : two) EXPECT_EQ(answers[i], separate[i]);
  }
}

TEST_F(MergeTest, ExactRequestsAreComputedOneByOne) {
  start();
  const std::vector<Request> requests = {request(1, 1), request(9, 2), request(6, 3)};
  std::vector<std::vector<float>> separate;
  for (const Request& what : requests) separate.push_back(alone(Numerics::kExact, what));
  const std::size_t before = calls();
  EXPECT_EQ(together(Numerics::kExact, requests, {2, 0, 1}, 3), separate);
  EXPECT_EQ(calls_since(before), (std::vector<std::size_t>{1, 24, 4, 36}));
  EXPECT_EQ(server_->stats().requests_merged, 0u);
}

TEST_F(MergeTest, FastRequestsShareABatchAndKeepTheirOwnSums) {
  start();
  std::vector<Request> requests = {request(1, 1), request(2, 2), request(1, 3), request(1, 4)};
  for (Request& what : requests) what.weights.assign(what.pairs.size(), 0.25f);
  requests[2].weights.clear();  // one that wants rows per pair
  std::vector<std::vector<float>> separate;
  for (const Request& what : requests) separate.push_back(alone(Numerics::kFast, what));
  const std::size_t before = calls();
  const std::vector<std::vector<float>> answers = together(Numerics::kFast, requests, {0, 1, 2, 3}, 1);
  EXPECT_EQ(calls_since(before), (std::vector<std::size_t>{1, 20}));
  for (std::size_t r = 0; r < requests.size(); ++r) {
    ASSERT_EQ(answers[r].size(), separate[r].size());
    for (std::size_t i = 0; i < answers[r].size(); ++i) ASSERT_NEAR(answers[r][i], separate[r][i], 1e-3) << r << " " << i;
  }
}

TEST_F(MergeTest, TheLineStaysFirstComeFirstServed) {
  ServerOptions options;
  options.merged_pairs_max = 10;
  start(options);
  std::vector<Request> requests = {request(1, 1), request(1, 2), request(1, 3), request(1, 4, 1), request(1, 5)};
  requests[1].layer = 1;
  const std::size_t before = calls();
  // 0 takes 2 along, past 1 of another layer; there is no room for 4 (of 4 pairs), and 3, behind it, waits too.
  together(Numerics::kFast, requests, {0, 1, 2, 4, 3}, 3);
  EXPECT_EQ(calls_since(before), (std::vector<std::size_t>{1, 8, 4, 5}));
}

TEST_F(MergeTest, OneThatIsRefusedOrLeavesDoesNotHarmTheOthers) {
  start();
  const Request good = request(2, 1);
  const std::vector<float> want = alone(Numerics::kInvariant, good);
  Request absent = request(1, 2);
  absent.pairs[2].expert = 4000;
  const auto first = connect(), second = connect(), bad = connect(), cancelling = connect();
  auto leaving = connect();
  hold();
  std::uint32_t waiting = 0;
  for (const auto& [client, what] : {std::pair{first.get(), &good}, {bad.get(), &absent}, {cancelling.get(), &good},
                                     {leaving.get(), &good}, {second.get(), &good}}) {
    send(*client, 7, Numerics::kInvariant, *what);
    wait_for_line(++waiting);
  }
  const std::size_t before = calls();
  state_->let_on(1);  // the plug; the batch has begun when it is seen
  ASSERT_TRUE(state_->wait_for_calls(before + 2));
  EXPECT_EQ(calls_since(before), (std::vector<std::size_t>{1, 32}));
  EXPECT_EQ(bad->error(7).code, ErrorCode::kExpertNotHeld);
  cancelling->send(wire::encode_empty_frame(FrameType::kCancel, 7));
  EXPECT_EQ(cancelling->error(7).code, ErrorCode::kCancelled);
  leaving->shut();
  const TimePoint deadline = monotonic_now() + kPatience;
  while (server_->stats().connections_open > 6 && monotonic_now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(server_->stats().connections_open, 6u);
  state_->let_on(1);
  EXPECT_EQ(first->result(7), want);
  EXPECT_EQ(second->result(7), want);
  state_->let_on(1);
  send(*cancelling, 8, Numerics::kInvariant, good);
  EXPECT_EQ(cancelling->result(8), want);
}

TEST_F(MergeTest, AFailureOfTheEngineIsToldToAllOfThem) {
  start();
  const auto first = connect(), second = connect();
  hold();
  send(*first, 7, Numerics::kFast, request(1, 1));
  wait_for_line(1);
  send(*second, 7, Numerics::kFast, request(1, 2));
  wait_for_line(2);
  {
    const std::lock_guard lock(state_->mutex);
    state_->fail = true;
  }
  state_->let_on(2);
  EXPECT_EQ(first->error(7).code, ErrorCode::kInternal);
  EXPECT_EQ(second->error(7).code, ErrorCode::kInternal);
}

}  // namespace
}  // namespace kvasir::worker
