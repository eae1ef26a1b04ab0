// Uploads over a real connection: what is taken, what is refused, what makes room.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "gguf/memory_slice.h"
#include "worker/testing.h"

namespace kvasir::worker {
namespace {

using ::testing::HasSubstr;
using testing::TestClient;
using testing::TestServer;
using wire::ErrorCode;
using wire::FrameType;

constexpr std::uint32_t kWidth = 64, kExperts = 8;

// One layer of random f32 experts and the slices of it.
class Experts {
 public:
  explicit Experts(std::uint32_t layer, std::uint8_t id) {
    id_.fill(static_cast<std::byte>(id));
    for (const char* role : {"gate", "up", "down"}) {
      data_.push_back(testing::random_rows(std::size_t{kWidth} * kWidth * kExperts, layer + 10 * static_cast<std::uint32_t>(data_.size() + 1)));
      names_.push_back("blk." + std::to_string(layer) + ".ffn_" + role + "_exps.weight");
    }
  }
  Bytes slice(const ExpertSet& kept) const {
    std::vector<gguf::MemoryTensor> tensors;
    for (std::size_t i = 0; i < names_.size(); ++i)
      tensors.push_back({names_[i], GGML_TYPE_F32, {kWidth, kWidth, kExperts, 1}, std::as_bytes(std::span(data_[i])).data()});
    return gguf::make_memory_slice({id_, "test", kWidth, kExperts, tensors}, kept).value();
  }
  const wire::LayerId& id() const { return id_; }
  wire::Recipe recipe() const {
    wire::Recipe recipe;
    recipe.n_embd = recipe.n_ff = kWidth;
    recipe.n_expert = kExperts;
    return recipe;
  }

 private:
  wire::LayerId id_{};
  std::vector<std::vector<float>> data_;
  std::vector<std::string> names_;
};

void send_part(TestClient& client, std::uint64_t request_id, std::uint64_t total, std::uint64_t offset, ByteSpan part) {
  Bytes frame = wire::encode_upload_prefix(request_id, {.total_bytes = total, .offset = offset}, part, true);
  frame.insert(frame.end(), part.begin(), part.end());
  client.send(frame);
}

// In several parts, whatever the answer.
void upload(TestClient& client, std::uint64_t request_id, const Bytes& slice) {
  const std::size_t part = slice.size() / 3 + 1;
  for (std::size_t at = 0; at < slice.size(); at += part)
    send_part(client, request_id, slice.size(), at, ByteSpan(slice).subspan(at, std::min(part, slice.size() - at)));
}

// The frame that answers, HOLDINGS of other requests aside.
std::optional<wire::FrameHeader> answer(TestClient& client, std::uint64_t request_id) {
  while (auto header = client.next())
    if (header->request_id == request_id) return header;
  return std::nullopt;
}
wire::Holdings accepted(TestClient& client, std::uint64_t request_id) {
  const auto header = answer(client, request_id);
  EXPECT_TRUE(header && header->type == FrameType::kHoldings);
  return wire::decode_holdings(client.payload()).value_or(wire::Holdings{});
}
wire::ErrorMessage refused(TestClient& client, std::uint64_t request_id) {
  const auto header = answer(client, request_id);
  EXPECT_TRUE(header && header->type == FrameType::kError);
  return wire::decode_error(client.payload()).value_or(wire::ErrorMessage{});
}

ServerOptions with_memory(std::uint64_t bytes) {
  ServerOptions options;
  options.memory_bytes = bytes;
  return options;
}

std::vector<float> run(TestClient& client, std::uint64_t request_id, std::uint32_t recipe_id, std::uint32_t expert,
                       std::span<const float> row) {
  const wire::Pair pair{0, expert};
  client.send_exec(request_id, {.recipe_id = recipe_id, .n_rows = 1, .n_pairs = 1, .n_embd = kWidth}, {&pair, 1}, row);
  const auto header = answer(client, request_id);
  if (!header || header->type != FrameType::kResult) return {};
  const auto view = wire::decode_result(client.payload());
  std::vector<float> out(kWidth);
  if (view) std::memcpy(out.data(), view->rows.data(), kWidth * sizeof(float));
  return out;
}

TEST(Upload, IsHeldListedEverywhereAndServed) {
  TestServer server({}, with_memory(8 << 20));
  TestClient other(server.port()), client(server.port());
  EXPECT_TRUE(other.greet().entries.empty());
  const wire::Holdings before = client.greet();
  EXPECT_GT(before.upload_bytes_free, 3u << 20);
  EXPECT_LE(before.upload_bytes_free, 4u << 20);
  const Experts experts(3, 1);
  const ExpertSet kept = ExpertSet::from_ids({1, 2, 6});
  upload(client, 7, experts.slice(kept));
  const wire::Holdings after = accepted(client, 7);
  ASSERT_EQ(after.entries.size(), 1u);
  EXPECT_EQ(after.entries[0].layer_id, experts.id());
  EXPECT_EQ(after.entries[0].layer, 3u);
  EXPECT_EQ(after.entries[0].n_expert, kExperts);
  EXPECT_EQ(after.entries[0].experts, kept);
  const auto told = other.next();
  ASSERT_TRUE(told && told->type == FrameType::kHoldings);
  EXPECT_EQ(wire::decode_holdings(other.payload())->entries, after.entries);

  const std::vector<float> row = testing::random_rows(kWidth, 5);
  other.bind(0, experts.id(), experts.recipe());
  EXPECT_EQ(run(other, 9, 0, 6, row).size(), kWidth);
  // The same again is nothing new; other experts of the layer have no place beside them.
  upload(client, 8, experts.slice(ExpertSet::from_ids({2})));
  EXPECT_EQ(accepted(client, 8).entries, after.entries);
  upload(client, 9, experts.slice(ExpertSet::from_ids({0})));
  const wire::ErrorMessage others = refused(client, 9);
  EXPECT_EQ(others.code, ErrorCode::kNoRoom);
  EXPECT_THAT(others.message, HasSubstr("other experts of layer 3"));
}

TEST(Upload, TheOneUsedLongestAgoMakesRoom) {
  const std::uint64_t layer_bytes = 3ull * kWidth * kWidth * sizeof(float) * kExperts;
  // Room for one layer held and one on its way in, which takes its length twice.
  TestServer server({}, with_memory(3 * layer_bytes + layer_bytes / 2));
  TestClient client(server.port());
  client.greet();
  const Experts a(0, 1), b(1, 2), c(2, 3);
  const std::vector<float> row = testing::random_rows(kWidth, 5);
  upload(client, 1, a.slice(ExpertSet::all(kExperts)));
  accepted(client, 1);
  upload(client, 2, b.slice(ExpertSet::all(kExperts)));
  accepted(client, 2);
  client.bind(0, a.id(), a.recipe());
  client.bind(1, b.id(), b.recipe());
  const std::vector<float> from_b = run(client, 3, 1, 4, row), from_a = run(client, 4, 0, 4, row);  // a is used last
  ASSERT_EQ(from_a.size(), kWidth);
  ASSERT_NE(from_a, from_b);
  upload(client, 5, c.slice(ExpertSet::all(kExperts)));
  const wire::Holdings held = accepted(client, 5);
  ASSERT_EQ(held.entries.size(), 2u);
  EXPECT_EQ(held.entries[0].layer_id, a.id());
  EXPECT_EQ(held.entries[1].layer_id, c.id());
  const wire::Pair pair{0, 4};
  client.send_exec(6, {.recipe_id = 1, .n_rows = 1, .n_pairs = 1, .n_embd = kWidth}, {&pair, 1}, row);
  EXPECT_EQ(refused(client, 6).code, ErrorCode::kUnknownLayer);
  // The recipe serves again when the layer is back, and the graphs are of the new tensors.
  upload(client, 7, b.slice(ExpertSet::all(kExperts)));
  accepted(client, 7);
  EXPECT_EQ(run(client, 8, 1, 4, row), from_b);
}

TEST(Upload, RefusesWhatHasNoRoom) {
  const Bytes slice = Experts(0, 1).slice(ExpertSet::all(kExperts));
  {
    TestServer server({});  // no --memory
    TestClient client(server.port());
    EXPECT_EQ(client.greet().upload_bytes_free, 0u);
    upload(client, 1, slice);
    const wire::ErrorMessage why = refused(client, 1);
    EXPECT_EQ(why.code, ErrorCode::kNoRoom);
    EXPECT_THAT(why.message, HasSubstr("--memory"));
    upload(client, 2, slice);  // the parts sent after the refusal have not hurt the connection
    EXPECT_EQ(refused(client, 2).code, ErrorCode::kNoRoom);
  }
  TestServer server({}, with_memory(2 * slice.size() - 1));
  TestClient client(server.port());
  client.greet();
  upload(client, 1, slice);
  EXPECT_EQ(refused(client, 1).code, ErrorCode::kNoRoom);
  // A claim of 8 GiB takes no memory.
  send_part(client, 2, wire::kUploadBytesMax, 0, ByteSpan(slice).first(100));
  EXPECT_EQ(refused(client, 2).code, ErrorCode::kNoRoom);
}

TEST(Upload, ADeadConnectionGivesItsRoomBack) {
  const Bytes slice = Experts(0, 1).slice(ExpertSet::all(kExperts));
  TestServer server({}, with_memory(2 * slice.size() + (128 << 10)));
  TestClient dying(server.port()), client(server.port());
  dying.greet();
  client.greet();
  send_part(dying, 1, slice.size(), 0, ByteSpan(slice).first(slice.size() / 2));
  dying.send(FrameType::kPing, 5, wire::Ping{.sent_ns = 1});  // answered when the part is in
  ASSERT_TRUE(dying.next());
  upload(client, 1, slice);
  EXPECT_EQ(refused(client, 1).code, ErrorCode::kNoRoom);
  dying.shut();
  for (int attempt = 2;; ++attempt) {
    upload(client, attempt, slice);
    const auto header = answer(client, attempt);
    ASSERT_TRUE(header);
    if (header->type == FrameType::kHoldings) break;
    ASSERT_LT(attempt, 500);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

TEST(Upload, AStalledOneIsDropped) {
  const Bytes slice = Experts(0, 1).slice(ExpertSet::all(kExperts));
  ServerOptions options = with_memory(8 << 20);
  options.timeouts.stall = std::chrono::milliseconds(100);
  TestServer server({}, options);
  TestClient client(server.port());
  client.greet();
  send_part(client, 1, slice.size(), 0, ByteSpan(slice).first(1000));
  EXPECT_THAT(refused(client, 1).message, HasSubstr("stood still"));
  upload(client, 2, slice);
  EXPECT_EQ(accepted(client, 2).entries.size(), 1u);
}

TEST(Upload, RefusesDamagedAndForeignBytes) {
  TestServer server({}, with_memory(16 << 20));
  TestClient client(server.port());
  client.greet();
  const Bytes good = Experts(0, 1).slice(ExpertSet::all(kExperts));
  Bytes damaged = good;
  damaged[damaged.size() - 100] ^= std::byte{1};
  upload(client, 1, damaged);
  const wire::ErrorMessage hash = refused(client, 1);
  EXPECT_EQ(hash.code, ErrorCode::kBadUpload);
  EXPECT_THAT(hash.message, HasSubstr("damaged"));
  upload(client, 2, Bytes(5000, std::byte{0x47}));
  EXPECT_EQ(refused(client, 2).code, ErrorCode::kBadUpload);
  upload(client, 3, Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(good.size() / 2)));
  EXPECT_EQ(refused(client, 3).code, ErrorCode::kBadUpload);
  upload(client, 4, good);  // the connection and its room are as before
  EXPECT_EQ(accepted(client, 4).entries.size(), 1u);
}

TEST(Upload, PartsOutOfOrderEndTheConnection) {
  TestServer server({}, with_memory(8 << 20));
  const Bytes slice = Experts(0, 1).slice(ExpertSet::all(kExperts));
  const ByteSpan part = ByteSpan(slice).first(1000);
  const auto malformed = [&](auto&& misuse) {
    TestClient client(server.port());
    client.greet();
    misuse(client);
    const auto header = client.next();
    return header && header->type == FrameType::kError && wire::decode_error(client.payload())->code == ErrorCode::kMalformed;
  };
  EXPECT_TRUE(malformed([&](TestClient& client) { send_part(client, 0, slice.size(), 0, part); }));
  EXPECT_TRUE(malformed([&](TestClient& client) { send_part(client, 1, slice.size(), 1000, part); }));
  EXPECT_TRUE(malformed([&](TestClient& client) {
    send_part(client, 1, slice.size(), 0, part);
    send_part(client, 1, slice.size(), 2000, part);
  }));
  EXPECT_TRUE(malformed([&](TestClient& client) {
    send_part(client, 1, slice.size(), 0, part);
    send_part(client, 2, slice.size(), 0, part);
  }));
}

}  // namespace
}  // namespace kvasir::worker
