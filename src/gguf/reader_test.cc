#include "gguf/reader.h"

#include <unistd.h>

#include <functional>

#include "gguf/test_support.h"

namespace kvasir::gguf {
namespace {

// Writes a GGUF field by field, with nothing right but what the test puts there.
struct RawGguf {
  std::string magic = "GGUF";
  std::uint32_t version = 3;
  std::uint64_t n_tensors = 0, n_kv = 0;
  Bytes body;

  void key(std::string_view name, std::uint32_t type) {
    ++n_kv;
    string(name);
    put(type);
  }
  void string(std::string_view text) {
    put<std::uint64_t>(text.size());
    ByteWriter(body).put_bytes(text);
  }
  void tensor(std::string_view name, std::vector<std::uint64_t> ne, std::uint32_t type, std::uint64_t offset) {
    ++n_tensors;
    string(name);
    put(static_cast<std::uint32_t>(ne.size()));
    for (std::uint64_t n : ne) put(n);
    put(type);
    put(offset);
  }
  template <typename T>
  void put(T value) {
    ByteWriter(body).put(value);
  }
  Bytes bytes(std::size_t data_bytes = 0) const {
    Bytes out;
    ByteWriter writer(out);
    writer.put_bytes(magic);
    writer.put(version);
    writer.put(n_tensors);
    writer.put(n_kv);
    writer.put_bytes(body);
    out.resize((out.size() + 31) / 32 * 32 + data_bytes);
    return out;
  }
};

Result<GgufFile> open(ByteSpan bytes) { return GgufFile::open(make_memory_source("x.gguf", bytes)); }

struct Refusal {
  const char* what;
  std::function<Bytes()> make;
  const char* expected;  // part of the message
};

template <typename Build>
std::function<Bytes()> raw(Build build, std::size_t data_bytes = 0) {
  return [build, data_bytes] {
    RawGguf gguf;
    build(gguf);
    return gguf.bytes(data_bytes);
  };
}

std::vector<Refusal> refusals() {
  using R = RawGguf;
  const auto tensor = [](std::vector<std::uint64_t> ne, std::uint32_t type, std::uint64_t offset) {
    return raw([=](R& g) { g.tensor("t", ne, type, offset); }, 64);
  };
  return {
      {"empty", [] { return Bytes(); }, "not a GGUF file"},
      {"magic", raw([](R& g) { g.magic = "GGML"; }), "not a GGUF file"},
      {"version 1", raw([](R& g) { g.version = 1; }), "version 1 is not known"},
      {"version 4", raw([](R& g) { g.version = 4; }), "version 4 is not known"},
      {"big-endian", raw([](R& g) { g.version = 3u << 24; }), "big-endian"},
      {"too many values", raw([](R& g) { g.n_kv = kMaxKeyValues + 1; }), "metadata values; the limit is"},
      {"too many tensors", raw([](R& g) { g.n_tensors = kMaxTensors + 1; }), "tensors; the limit is"},
      {"negative count", raw([](R& g) { g.n_tensors = ~0ull; }), "the limit is"},
      {"counts past the end", raw([](R& g) { g.n_kv = kMaxKeyValues; }), "than it has room for"},
      {"long key", raw([](R& g) {
        g.key(std::string(kMaxKeyBytes + 1, 'k'), 0);
        g.put<std::uint8_t>(1);
      }), "a metadata key of"},
      {"empty key", raw([](R& g) { g.key("", GGUF_TYPE_UINT8); g.put<std::uint8_t>(1); }), "key is empty"},
      {"huge key length", raw([](R& g) {
        g.n_kv = 1;
        g.put<std::uint64_t>(~0ull);
        g.body.resize(64);
      }), "longer than the limit"},
      {"value type", raw([](R& g) { g.key("k", 13); g.body.resize(g.body.size() + 64); }), "unknown value type 13"},
      {"array of arrays", raw([](R& g) {
        g.key("k", GGUF_TYPE_ARRAY);
        g.put<std::uint32_t>(GGUF_TYPE_ARRAY);
        g.put<std::uint64_t>(1);
      }), "array of arrays"},
      {"array too long", raw([](R& g) {
        g.key("k", GGUF_TYPE_ARRAY);
        g.put<std::uint32_t>(0);
        g.put<std::uint64_t>(kMaxArrayElements + 1);
      }), "elements; the limit is"},
      {"array past the end", raw([](R& g) {
        g.key("k", GGUF_TYPE_ARRAY);
        g.put<std::uint32_t>(GGUF_TYPE_UINT64);
        g.put<std::uint64_t>(kMaxArrayElements);
      }), "ends inside its header"},
      {"strings past the end", raw([](R& g) {
        g.key("k", GGUF_TYPE_ARRAY);
        g.put<std::uint32_t>(GGUF_TYPE_STRING);
        g.put<std::uint64_t>(1000);
      }), "more strings than the file has room for"},
      {"long string", raw([](R& g) {
        g.key("k", GGUF_TYPE_STRING);
        g.put<std::uint64_t>(kMaxStringBytes + 1);
      }), "bytes; the limit is"},
      {"string past the end", raw([](R& g) {
        g.key("k", GGUF_TYPE_STRING);
        g.put<std::uint64_t>(1000);
      }), "ends inside its header"},
      {"key twice", raw([](R& g) {
        for (int i = 0; i < 2; ++i) {
          g.key("k", GGUF_TYPE_UINT8);
          g.put<std::uint8_t>(1);
        }
        g.body.resize(64);
      }), "'k' occurs twice"},
      {"alignment 0", raw([](R& g) {
        g.key("general.alignment", GGUF_TYPE_UINT32);
        g.put<std::uint32_t>(0);
      }), "alignment"},
      {"alignment 24", raw([](R& g) {
        g.key("general.alignment", GGUF_TYPE_UINT32);
        g.put<std::uint32_t>(24);
      }), "alignment"},
      {"alignment 2^31", raw([](R& g) {
        g.key("general.alignment", GGUF_TYPE_UINT32);
        g.put<std::uint32_t>(1u << 31);
      }), "alignment"},
      {"alignment type", raw([](R& g) {
        g.key("general.alignment", GGUF_TYPE_UINT64);
        g.put<std::uint64_t>(32);
      }), "alignment"},
      {"long tensor name", raw([](R& g) {
        g.tensor(std::string(kMaxTensorNameBytes + 1, 't'), {1}, 0, 0);
      }, 64), "a tensor name of"},
      {"tensor twice", raw([](R& g) { g.tensor("t", {1}, 0, 0); g.tensor("t", {1}, 0, 32); }, 64), "'t' occurs twice"},
      {"five dimensions", tensor({1, 1, 1, 1, 1}, 0, 0), "5 dimensions; the limit is 4"},
      {"huge dimension count", raw([](R& g) {
        g.n_tensors = 1;
        g.string("t");
        g.put<std::uint32_t>(~0u);
        g.body.resize(100);
      }), "dimensions; the limit is 4"},
      {"empty dimension", tensor({4, 0}, 0, 0), "empty dimension"},
      {"elements overflow", tensor({1ull << 32, 1ull << 32, 4}, 0, 0), "overflows"},
      {"negative dimension", tensor({~0ull}, 0, 0), "overflows"},
      {"bytes overflow", tensor({1ull << 61}, 0, 0), "overflows"},
      {"type unknown", tensor({32}, GGML_TYPE_COUNT, 0), "does not know"},
      {"type removed", tensor({32}, 4, 0), "does not know"},
      {"type negative", tensor({32}, ~0u, 0), "does not know"},
      {"row not whole blocks", tensor({33}, GGML_TYPE_Q4_0, 0), "not a multiple of q4_0's block of 32"},
      {"offset past the end", tensor({4}, 0, 64), "ends past the end of the file"},
      {"data past the end", tensor({17}, 0, 0), "ends past the end of the file"},
      {"offset wraps", tensor({4}, 0, ~0ull - 31), "ends past the end of the file"},
      {"offset not aligned", tensor({4}, 0, 4), "not aligned"},
  };
}

TEST(Reader, RefusesEveryBrokenFileInOneSentence) {
  for (const Refusal& refusal : refusals()) {
    // A copy of exactly this size, so that a sanitizer sees any read past the end.
    const Bytes bytes = refusal.make();
    const auto file = open(bytes);
    ASSERT_FALSE(file) << refusal.what;
    EXPECT_THAT(file.error().message, testing::HasSubstr(refusal.expected)) << refusal.what;
    EXPECT_EQ(file.error().action, ErrorAction::kFixInput) << refusal.what;
    expect_one_sentence(file.error().message);
  }
}

TEST(Reader, AcceptsWhatIsJustWithinTheLimits) {
  RawGguf gguf;
  gguf.key(std::string(kMaxKeyBytes, 'k'), GGUF_TYPE_BOOL);
  gguf.put<std::uint8_t>(1);
  gguf.key("general.alignment", GGUF_TYPE_UINT32);
  gguf.put<std::uint32_t>(1);
  gguf.tensor(std::string(kMaxTensorNameBytes, 't'), {16, 1, 1, 1}, GGML_TYPE_F32, 0);
  Bytes bytes = gguf.bytes();
  bytes.resize(24 + gguf.body.size() + 64);
  const auto file = open(bytes);
  ASSERT_TRUE(file) << message_of(file);
  EXPECT_EQ(file->tensors()[0].nbytes, 64u);
  EXPECT_EQ(file->get_bool(std::string(kMaxKeyBytes, 'k')), true);
}

TEST(Reader, ReadsValuesOfEveryKind) {
  for (std::uint32_t version : {2u, 3u}) {
    RawGguf gguf;
    gguf.version = version;
    gguf.key("i8", GGUF_TYPE_INT8);
    gguf.put<std::int8_t>(-3);
    gguf.key("u16", GGUF_TYPE_UINT16);
    gguf.put<std::uint16_t>(65535);
    gguf.key("i64", GGUF_TYPE_INT64);
    gguf.put<std::int64_t>(1ll << 40);
    gguf.key("f32", GGUF_TYPE_FLOAT32);
    gguf.put(1.5f);
    gguf.key("text", GGUF_TYPE_STRING);
    gguf.string("hello");
    gguf.key("texts", GGUF_TYPE_ARRAY);
    gguf.put<std::uint32_t>(GGUF_TYPE_STRING);
    gguf.put<std::uint64_t>(3);
    for (const char* text : {"a", "", "ccc"}) gguf.string(text);
    gguf.key("numbers", GGUF_TYPE_ARRAY);
    gguf.put<std::uint32_t>(GGUF_TYPE_INT32);
    gguf.put<std::uint64_t>(2);
    gguf.put<std::int32_t>(7);
    gguf.put<std::int32_t>(9);
    gguf.key("negative", GGUF_TYPE_ARRAY);
    gguf.put<std::uint32_t>(GGUF_TYPE_INT64);
    gguf.put<std::uint64_t>(1);
    gguf.put<std::int64_t>(-1);
    const Bytes bytes = gguf.bytes();
    const auto file = open(bytes);
    ASSERT_TRUE(file) << message_of(file);
    EXPECT_EQ(file->version(), version);
    EXPECT_EQ(file->get_uint("i8"), std::nullopt);
    EXPECT_EQ(file->get_uint("u16"), 65535u);
    EXPECT_EQ(file->get_uint("i64"), 1ull << 40);
    EXPECT_EQ(file->get_uint("f32"), std::nullopt);
    EXPECT_EQ(file->get_uint("missing"), std::nullopt);
    EXPECT_EQ(*file->get_string("text"), "hello");
    EXPECT_THAT(*file->get_string_array("texts", 3), testing::ElementsAre("a", "", "ccc"));
    EXPECT_THAT(*file->get_u32_array("numbers", 2), testing::ElementsAre(7u, 9u));
    for (const std::string& message :
         {message_of(file->get_string_array("texts", 2)), message_of(file->get_u32_array("numbers", 1)),
          message_of(file->get_u32_array("negative", 9)), message_of(file->get_u32_array("texts", 9)),
          message_of(file->get_string("numbers")), message_of(file->get_string("missing"))}) {
      EXPECT_NE(message, "no error");
      expect_one_sentence(message);
    }
    const Bytes text = *file->get_raw_value(*file->find("text"));
    EXPECT_EQ(text.size(), 4u + 8 + 5);
    EXPECT_EQ(load_le<std::uint32_t>(text.data()), static_cast<std::uint32_t>(GGUF_TYPE_STRING));
  }
}

TEST(Reader, EveryPrefixOfAModelIsRefusedOrWhole) {
  const Bytes whole = side_tensor_model();
  const auto file = open(whole);
  ASSERT_TRUE(file) << message_of(file);
  const std::uint64_t end = file->tensors().back().offset + file->tensors().back().nbytes;
  for (std::size_t size = 0; size < whole.size(); size += size < file->data_offset() ? 1 : 61) {
    const Bytes prefix(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_EQ(open(prefix).has_value(), size >= end) << size;
  }
}

TEST(Reader, DamagedHeadersNeverCrash) {
  const Bytes whole = side_tensor_model();
  const auto header_bytes = static_cast<std::size_t>(open(whole)->data_offset());
  std::mt19937_64 random(1);
  int refused = 0;
  for (int i = 0; i < 8000; ++i) {
    Bytes damaged = whole;
    for (auto n = random() % 3; n < 3; ++n)
      damaged[random() % header_bytes] = static_cast<std::byte>(random() % 4 == 0 ? 0xff : random());
    if (!open(damaged)) ++refused;
  }
  EXPECT_GT(refused, 2000);
}

TEST(Reader, LargeVocabularyIsWalkedNotLoaded) {
  HeaderBuilder builder;
  builder.add_string("general.architecture", "x");
  std::vector<std::string> tokens;
  for (int i = 0; i < 300000; ++i) tokens.push_back(std::format("token number {}", i));
  builder.add_string_array("tokenizer.ggml.tokens", tokens);
  builder.add_u32("after", 5);
  const Bytes bytes = builder.header();
  const auto file = open(bytes);
  ASSERT_TRUE(file) << message_of(file);
  EXPECT_EQ(file->get_uint("after"), 5u);
  EXPECT_EQ(file->find("tokenizer.ggml.tokens")->count, 300000u);
}

TEST(FileSource, SaysWhatIsWrong) {
  const TempDir dir;
  for (const std::string& path : {dir / "missing", dir / ""}) {
    const auto source = open_file_source(path);
    ASSERT_FALSE(source);
    expect_one_sentence(source.error().message);
  }
  write_file(dir / "short", Bytes(100));
  const auto source = open_file_source(dir / "short");
  ASSERT_TRUE(source);
  Bytes out(60);
  EXPECT_TRUE((*source)->read_at(40, out));
  EXPECT_FALSE((*source)->read_at(41, out));
  EXPECT_FALSE((*source)->read_at(~0ull, out));
  // A file that shrinks under the reader is an error, not a signal.
  ASSERT_EQ(::truncate((dir / "short").c_str(), 50), 0);
  const auto read = (*source)->read_at(40, out);
  ASSERT_FALSE(read);
  EXPECT_THAT(read.error().message, testing::HasSubstr("became shorter"));
}

}  // namespace
}  // namespace kvasir::gguf
