#include "plugin/state_files.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

namespace kvasir::plugin {
namespace {

std::string content(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Without the lock the file was empty, or of an earlier state, at one of these ends or more.
TEST(StateFiles, TheLastStateStaysWhateverTheWritingThreadDoes) {
  const std::string path =
      std::filesystem::temp_directory_path() / ("kvasir-state-files-" + std::to_string(::getpid()));
  for (int i = 0; i < 30; ++i) {
    std::atomic<bool> ending = false;
    StateFiles files({{path, [&] { return ending ? std::string("the end") : std::string(1'000'000, 'x'); }}});
    std::atomic<int> written = 0;
    std::jthread thread([&](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        files.write();
        ++written;
      }
    });
    while (written < 3) std::this_thread::yield();
    ending = true;
    files.write_last();
    EXPECT_EQ(content(path), "the end");
    const int then = written;
    while (written < then + 2) std::this_thread::yield();
    EXPECT_EQ(content(path), "the end");
  }
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace kvasir::plugin
