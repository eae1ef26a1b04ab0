// For tests of the server: a slice of two layers, of which experts 1 and 3:6 are held.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "worker/testing.h"

namespace kvasir::worker {

inline constexpr std::uint32_t kWidth = 256;

class ServerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = new testing::TempDir;
    testing::make_model(*dir_ / "model.gguf", {});
    testing::make_slice(*dir_ / "model.gguf", "0:2", "1,3:6", *dir_ / "slice.gguf");
    store_ = new SliceStore(testing::load({slice()}));
  }
  static void TearDownTestSuite() {
    delete store_;
    delete dir_;
  }
  static std::string slice() { return *dir_ / "slice.gguf"; }
  static const HeldLayer& layer(std::size_t i = 0) { return *store_->layers()[i]; }
  static wire::Recipe recipe() { return *plain_swiglu_recipe(layer()); }
  static wire::ExecHead head(std::size_t n_rows, std::size_t n_pairs, std::uint32_t recipe_id = 0) {
    return {.recipe_id = recipe_id,
            .n_rows = static_cast<std::uint32_t>(n_rows),
            .n_pairs = static_cast<std::uint32_t>(n_pairs),
            .n_embd = kWidth};
  }
  // Every held expert once per row.
  static std::vector<wire::Pair> all_pairs(std::uint32_t n_rows) {
    std::vector<wire::Pair> pairs;
    for (std::uint32_t row = 0; row < n_rows; ++row)
      for (std::uint32_t expert : {1u, 3u, 4u, 5u}) pairs.push_back({row, expert});
    return pairs;
  }
  // Keeps the engine busy for a while (0.3 s on a fast core).
  static constexpr std::uint32_t kLongRows = 8000;
  static void send_long_request(testing::TestClient& client, std::uint64_t request_id) {
    client.send_exec(request_id, head(kLongRows, kLongRows * 4), all_pairs(kLongRows),
                     testing::random_rows(std::size_t{kLongRows} * kWidth, 1));
  }
  static std::unique_ptr<testing::TestClient> connect(const testing::TestServer& server) {
    auto client = std::make_unique<testing::TestClient>(server.port());
    client->greet();
    client->bind(0, layer().layer_id, recipe());
    return client;
  }
  static void expect_answers(testing::TestClient& client, std::uint64_t request_id) {
    const std::vector<float> x = testing::random_rows(kWidth, 2);
    const std::vector<wire::Pair> pairs = all_pairs(1);
    client.send_exec(request_id, head(1, pairs.size()), pairs, x);
    EXPECT_EQ(client.result(request_id), testing::direct(layer(), recipe(), pairs, x));
  }

  static inline testing::TempDir* dir_ = nullptr;
  static inline SliceStore* store_ = nullptr;
};

}  // namespace kvasir::worker
