#include "gguf/output_file.h"

#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>

#include "gguf/backbone.h"
#include "gguf/slice.h"
#include "gguf/synth.h"
#include "gguf/test_support.h"

namespace kvasir::gguf {
namespace {

TEST(OutputFile, AppearsWholeOrNotAtAll) {
  const TempDir dir;
  const Bytes text(1000, std::byte{'x'});
  {
    auto out = OutputFile::create(dir / "a");
    ASSERT_TRUE(out) << message_of(out);
    ASSERT_TRUE(out->write_at(0, text));
    EXPECT_FALSE(std::filesystem::exists(dir / "a"));
  }
  EXPECT_EQ(dir.file_count(), 0u);

  for (int i = 0; i < 2; ++i) {  // the second time over the first
    auto out = OutputFile::create(dir / "a");
    ASSERT_TRUE(out) << message_of(out);
    ASSERT_TRUE(out->set_size(3000));
    ASSERT_TRUE(out->write_at(2000, text));
    ASSERT_TRUE(out->commit());
  }
  EXPECT_EQ(dir.file_count(), 1u);
  const Bytes back = read_file(dir / "a");
  ASSERT_EQ(back.size(), 3000u);
  EXPECT_EQ(back[1999], std::byte{0});
  EXPECT_EQ(back[2000], std::byte{'x'});
  struct stat info {};
  ASSERT_EQ(::stat((dir / "a").c_str(), &info), 0);
  const mode_t mask = ::umask(0);
  ::umask(mask);
  EXPECT_EQ(info.st_mode & 0777, 0666 & ~mask);
}

TEST(OutputFile, RefusesWhatItCannotBe) {
  const TempDir dir;
  for (const std::string& path : {dir / "", dir / "no/such/folder"}) {
    const auto out = OutputFile::create(path);
    ASSERT_FALSE(out);
    expect_one_sentence(out.error().message);
  }
}

TEST(OutputFile, CopiesFromFilesAndOtherSources) {
  const TempDir dir;
  Bytes data(3'000'000);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 2654435761u >> 13);
  write_file(dir / "in", data);
  for (const SourcePtr& source : {*open_file_source(dir / "in"), make_memory_source("memory", data)}) {
    auto out = OutputFile::create(dir / "out");
    ASSERT_TRUE(out->copy_from(*source, 17, 5, 2'999'000));
    Bytes back(2'999'000);
    ASSERT_TRUE(out->read_at(5, back));
    EXPECT_TRUE(std::equal(back.begin(), back.end(), data.begin() + 17));
    EXPECT_FALSE(out->copy_from(*source, 2'999'999, 0, 2));
  }
}

// A full disk, as the limit on a process's file size shows it (the same error path as
// ENOSPC, on any machine): each writer says so in one sentence and leaves nothing behind.
void expect_full_disk(const std::function<Status()>& write, std::uint64_t limit) {
  const auto child = [&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit small{limit, limit};
    if (::setrlimit(RLIMIT_FSIZE, &small) != 0) _exit(2);
    const Status status = write();
    if (status) _exit(3);
    std::fprintf(stderr, "%s\n", status.error().message.c_str());
    _exit(0);
  };
  EXPECT_EXIT(child(), testing::ExitedWithCode(0),
              "^cannot write '[^\n]*': File too large; free some space[^\n]*\\.\n$");
}

TEST(OutputFile, AFullDiskLeavesNothingBehind) {
  const TempDir dir;
  const auto model = MoeModel::open(real_model_path());
  const auto layout = SliceLayout::make(*model, *SlicePlan::from_ranges(*model, ":", ":"));
  const std::string path = dir / "out.gguf";
  expect_full_disk([&] { return write_slice(*layout, path); }, 5'000'000);
  expect_full_disk([&] { return write_backbone(*model, path); }, 1'000'000);
  expect_full_disk([&] { return write_synthetic({}, path); }, 1'000'000);
  expect_full_disk([&]() -> Status {  // reached in the middle, not when the size is set
    KVASIR_ASSIGN(const OutputFile out, OutputFile::create(path));
    return out.copy_from(model->files().metadata().source(), 0, 0, 10'000'000);
  }, 5'000'000);
  EXPECT_EQ(dir.file_count(), 0u);
}

}  // namespace
}  // namespace kvasir::gguf
