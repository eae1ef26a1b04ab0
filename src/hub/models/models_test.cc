#include <gtest/gtest.h>

#include <fstream>
#include <thread>

#include "gguf/output_file.h"
#include "gguf/slice.h"
#include "gguf/synth.h"
#include "hub/models/catalogue.h"
#include "hub/models/proof.h"

namespace kvasir::hub {
namespace {

namespace fs = std::filesystem;

class Models : public testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/kvasir-models-XXXXXX";
    ASSERT_NE(::mkdtemp(folder), nullptr);
    top_ = folder;
    fs::create_directories(top_ / "models");
    synth("m.gguf", 1);
  }
  void TearDown() override { fs::remove_all(top_); }

  void synth(const std::string& file, std::uint64_t seed) {
    gguf::SynthOptions options;
    options.n_layer = 2;
    options.n_expert = 8;
    options.seed = seed;
    ASSERT_TRUE(gguf::write_synthetic(options, (top_ / "models" / file).string()));
  }
  std::shared_ptr<HostedModel> open() {
    auto model = HostedModel::open(top_ / "models", "m.gguf", "m");
    EXPECT_TRUE(model) << model.error().message;
    return *model;
  }
  static Bytes read(const Body& body) {
    Bytes out;
    for (const BodyPiece& piece : body.pieces) {
      const std::size_t at = out.size(), n = static_cast<std::size_t>(piece.size);
      out.resize(at + n);
      if (piece.kind == BodyPiece::Kind::kMemory) std::memcpy(out.data() + at, piece.bytes->data() + piece.offset, n);
      if (piece.kind == BodyPiece::Kind::kFile) {
        EXPECT_EQ(::pread(piece.fd, out.data() + at, n, static_cast<off_t>(piece.offset)), static_cast<ssize_t>(n));
      }
    }
    return out;
  }
  static Bytes file_bytes(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    Bytes out(fs::file_size(path));
    in.read(reinterpret_cast<char*>(out.data()), static_cast<std::streamsize>(out.size()));
    return out;
  }

  fs::path top_;
};

TEST_F(Models, AStreamedSliceIsTheFileThatTheSlicerWrites) {
  const auto model = open();
  const auto plan = *gguf::SlicePlan::from_ranges(model->moe(), "0:2", "1:4,6");
  EXPECT_EQ(model->slice(plan).error().action, ErrorAction::kRetryLater);  // not hashed yet
  ASSERT_TRUE(model->compute_hashes([] { return false; }));
  const auto answer = model->slice(plan);
  ASSERT_TRUE(answer);
  const auto layout = *gguf::SliceLayout::make(model->moe(), plan);
  const std::string path = (top_ / "slice.gguf").string();
  ASSERT_TRUE(gguf::write_slice(layout, path));
  const Bytes expected = file_bytes(path);
  EXPECT_EQ(read(answer->body), expected);
  // Any range of it is that range.
  for (std::uint64_t begin : {std::uint64_t{0}, std::uint64_t{7}, answer->body.size / 3, answer->body.size - 5})
    for (std::uint64_t n : {1, 5, 100'000}) {
      const std::uint64_t end = std::min(begin + n, answer->body.size);
      Body part;
      part.append_range(answer->body, begin, end);
      ASSERT_EQ(read(part), Bytes(expected.begin() + static_cast<std::ptrdiff_t>(begin),
                                  expected.begin() + static_cast<std::ptrdiff_t>(end)));
    }
  // Another plan has another tag, the same has the same.
  EXPECT_EQ(model->slice(plan)->etag, answer->etag);
  EXPECT_NE(model->slice(*gguf::SlicePlan::from_ranges(model->moe(), "0:2", "1:4,7"))->etag, answer->etag);
}

TEST_F(Models, HashesAreKeptForTheSameFilesOnly) {
  auto model = open();
  ASSERT_TRUE(model->compute_hashes([] { return false; }));
  const fs::path cache = top_ / "m.hashes";
  ASSERT_TRUE(model->save_hashes(cache));
  auto again = open();
  ASSERT_TRUE(again->load_hashes(cache));
  EXPECT_TRUE(again->ready());
  EXPECT_TRUE(std::ranges::equal(again->slab_hashes(again->moe().layers()[0].tensors[0]),
                                 model->slab_hashes(model->moe().layers()[0].tensors[0])));
  // A flipped byte in the cache, or another file, and it is of no use.
  Bytes bytes = file_bytes(cache);
  bytes[bytes.size() / 2] ^= std::byte{1};
  std::ofstream(cache, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  EXPECT_FALSE(open()->load_hashes(cache));
  ASSERT_TRUE(model->save_hashes(cache));
  synth("m.gguf", 2);
  EXPECT_FALSE(open()->load_hashes(cache));
}

TEST_F(Models, AFileWrittenToInPlaceIsNoticed) {
  const auto model = open();
  ASSERT_TRUE(model->compute_hashes([] { return false; }));
  const auto plan = *gguf::SlicePlan::from_ranges(model->moe(), ":", ":");
  const auto answer = *model->slice(plan);
  EXPECT_TRUE(answer.body.check());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  {
    std::fstream file(top_ / "models" / "m.gguf", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-10, std::ios::end);
    file.put('x');
  }
  EXPECT_FALSE(answer.body.check());
  EXPECT_EQ(model->slice(plan).error().action, ErrorAction::kRetryLater);
}

TEST_F(Models, AFileReplacedByRenameGoesOnBeingServedToItsReaders) {
  const auto model = open();
  ASSERT_TRUE(model->compute_hashes([] { return false; }));
  const auto answer = *model->slice(*gguf::SlicePlan::from_ranges(model->moe(), "0:1", "0:2"));
  const Bytes before = read(answer.body);
  synth("new", 2);
  fs::rename(top_ / "models" / "new", top_ / "models" / "m.gguf");
  EXPECT_TRUE(answer.body.check());
  EXPECT_EQ(read(answer.body), before);
}

TEST_F(Models, ASliceProvesAsTheModelDoes) {
  const auto model = open();
  const auto plan = *gguf::SlicePlan::from_ranges(model->moe(), "1:2", "2,5:7");
  const std::string path = (top_ / "slice.gguf").string();
  ASSERT_TRUE(gguf::write_slice(*gguf::SliceLayout::make(model->moe(), plan), path));
  const auto slice = *gguf::MoeModel::open(path);
  const std::uint64_t bytes = proof_bytes(*leading_group(model->moe(), 1));
  EXPECT_EQ(bytes, model->shape().proof_bytes[1]);
  for (std::uint32_t expert : {2u, 5u, 6u})
    for (std::uint64_t offset : {std::uint64_t{0}, bytes / 3, bytes - 100}) {
      const auto expected = hash_span(model->moe(), 1, expert, offset, 100, "nonce"),
                 got = hash_span(slice, 1, expert, offset, 100, "nonce");
      ASSERT_TRUE(expected && got);
      EXPECT_EQ(*expected, *got);
      EXPECT_NE(*hash_span(slice, 1, expert, offset, 100, "other"), *got);
    }
  EXPECT_FALSE(hash_span(slice, 1, 3, 0, 100, "nonce"));
  EXPECT_FALSE(hash_span(slice, 0, 2, 0, 100, "nonce"));
  EXPECT_FALSE(hash_span(slice, 1, 2, bytes - 50, 100, "nonce"));
  EXPECT_FALSE(hash_span(slice, 1, 2, UINT64_MAX - 50, 100, "nonce"));
}

TEST_F(Models, TheCatalogueFollowsTheFolder) {
  std::mutex mutex;
  std::vector<std::string> events;
  const auto note = [&](std::string what) {
    const std::lock_guard lock(mutex);
    events.push_back(std::move(what));
  };
  std::ofstream(top_ / "models" / "broken.gguf") << "GGUF and then nothing";
  std::ofstream(top_ / "models" / "notes.txt") << "hello";
  Catalogue catalogue(top_ / "models", top_ / "cache",
                      {.appeared = [&](const HostedModelPtr& m) { note("+" + m->name()); },
                       .vanished = [&](const std::string& name) { note("-" + name); },
                       .log = [&](const std::string&) {}});
  ASSERT_TRUE(catalogue.start());
  const auto wait_until = [&](const auto& condition) {
    for (int i = 0; i < 400 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_TRUE(condition());
  };
  ASSERT_NE(catalogue.find("m"), nullptr);
  EXPECT_EQ(catalogue.list().size(), 1u);
  EXPECT_EQ(catalogue.find("../models/m"), nullptr);
  wait_until([&] { return catalogue.find("m")->ready(); });
  const auto old = catalogue.find("m");
  synth("n.gguf", 3);
  synth("new", 2);
  fs::rename(top_ / "models" / "new", top_ / "models" / "m.gguf");
  catalogue.rescan_soon();
  wait_until([&] { return catalogue.find("n") != nullptr && catalogue.find("m") != old; });
  fs::remove(top_ / "models" / "n.gguf");
  catalogue.rescan_soon();
  wait_until([&] { return catalogue.find("n") == nullptr; });
  const std::lock_guard lock(mutex);
  EXPECT_EQ(events, (std::vector<std::string>{"+m", "+m", "+n", "-n"}));
}

TEST(ModelNames, OnlyPlainNamesOfFirstParts) {
  EXPECT_EQ(model_name_of_file("Qwen3.5-122B.gguf"), "Qwen3.5-122B");
  EXPECT_EQ(model_name_of_file("big-00001-of-00003.gguf"), "big");
  for (const char* file :
       {"big-00002-of-00003.gguf", ".gguf", ".hidden.gguf", "a b.gguf", "model.bin", "a/b.gguf", "..gguf"})
    EXPECT_EQ(model_name_of_file(file), std::nullopt) << file;
}

}  // namespace
}  // namespace kvasir::hub
