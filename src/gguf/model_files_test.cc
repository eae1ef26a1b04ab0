#include "gguf/model_files.h"

#include "gguf/slice.h"
#include "gguf/test_support.h"

namespace kvasir::gguf {
namespace {

// The real model in several parts, cut by llama.cpp's own tool.
class SplitModel : public testing::Test {
 protected:
  void SetUp() override {
    const std::string command = std::format("llama-gguf-split --split --split-max-tensors 20 '{}' '{}' >'{}' 2>&1",
                                            real_model_path(), dir_ / "m", dir_ / "log");
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  }
  std::string part(int i) const { return dir_ / std::format("m-{:05}-of-00004.gguf", i); }

  TempDir dir_;
};

TEST_F(SplitModel, AnyPartNamesTheWholeSet) {
  const auto whole = ModelFiles::open(real_model_path());
  ASSERT_TRUE(whole) << message_of(whole);
  for (int i = 1; i <= 4; ++i) {
    const auto set = ModelFiles::open(part(i));
    ASSERT_TRUE(set) << message_of(set);
    ASSERT_EQ(set->files().size(), 4u);
    EXPECT_EQ(*set->metadata().get_string("general.name"), "tinymoe-en");
    ASSERT_EQ(set->tensors().size(), whole->tensors().size());
    for (const ModelFiles::Entry& entry : set->tensors()) {
      const TensorInfo* other = whole->metadata().find_tensor(entry.tensor->name);
      ASSERT_TRUE(other);
      Bytes a(static_cast<std::size_t>(other->nbytes)), b(a.size());
      ASSERT_EQ(entry.tensor->nbytes, other->nbytes);
      ASSERT_TRUE(set->files()[entry.file].source().read_at(entry.tensor->offset, a));
      ASSERT_TRUE(whole->metadata().source().read_at(other->offset, b));
      ASSERT_EQ(a, b) << entry.tensor->name;
    }
  }
}

TEST_F(SplitModel, SlicesAreThoseOfTheWholeModel) {
  const auto slice_of = [&](const std::string& path, const std::string& out) {
    const auto model = MoeModel::open(path);
    const auto plan = SlicePlan::from_ranges(*model, "1:3", "0:7,30");
    const auto layout = SliceLayout::make(*model, *plan);
    EXPECT_TRUE(write_slice(*layout, out));
    return read_file(out);
  };
  EXPECT_EQ(slice_of(part(3), dir_ / "a.gguf"), slice_of(real_model_path(), dir_ / "b.gguf"));
}

TEST_F(SplitModel, AMissingPartIsNamed) {
  std::filesystem::remove(part(2));
  const auto set = ModelFiles::open(part(1));
  ASSERT_FALSE(set);
  EXPECT_THAT(set.error().message, testing::AllOf(testing::HasSubstr("part 2 of 4"),
                                                  testing::HasSubstr("m-00002-of-00004.gguf")));
  expect_one_sentence(set.error().message);
}

TEST_F(SplitModel, RenamedAndMixedUpPartsAreRefused) {
  std::filesystem::copy(part(1), dir_ / "renamed.gguf");
  EXPECT_THAT(message_of(ModelFiles::open(dir_ / "renamed.gguf")), testing::HasSubstr("is not named like"));
  std::filesystem::rename(part(2), dir_ / "swap");
  std::filesystem::rename(part(3), part(2));
  std::filesystem::rename(dir_ / "swap", part(3));
  EXPECT_THAT(message_of(ModelFiles::open(part(1))), testing::HasSubstr("names are mixed up"));
}

TEST(ModelFiles, TooManyPartsAreRefused) {
  HeaderBuilder builder;
  builder.add_string("general.architecture", "x");
  builder.add_u32("split.count", kMaxParts + 1);
  const Bytes bytes = builder.header();
  const auto opener = [&](const std::string& name) -> Result<SourcePtr> { return make_memory_source(name, bytes); };
  EXPECT_THAT(message_of(ModelFiles::open("m-00001-of-00513.gguf", opener)), testing::HasSubstr("at most 512"));
}

TEST(PartName, ParsesAndFormats) {
  const auto name = PartName::parse("http://h/a-b-00002-of-00013.gguf?x=-00001-of-00002.gguf");
  ASSERT_TRUE(name);
  EXPECT_EQ(name->prefix, "http://h/a-b");
  EXPECT_EQ(name->part, 2u);
  EXPECT_EQ(name->n_parts, 13u);
  EXPECT_EQ(name->format(7), "http://h/a-b-00007-of-00013.gguf?x=-00001-of-00002.gguf");
  for (const char* bad : {"", "m.gguf", "-00001-of-00002.gguf", "m-0001-of-00002.gguf", "m-00000-of-00002.gguf",
                          "m-00003-of-00002.gguf",
                          "m-00001-of-00002.GGUF", "m-00001of-00002.gguf", "m-+0001-of-00002.gguf"})
    EXPECT_FALSE(PartName::parse(bad)) << bad;
}

}  // namespace
}  // namespace kvasir::gguf
