// The slice, inspect and synth commands as a user sees them: exit status, and one sentence
// for each thing that can be wrong.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <format>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace kvasir::cli {
namespace {

using testing::HasSubstr;

struct Ran {
  int status = -1;
  std::string out, err;
};

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class SliceCommand : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "kvasir-cli-XXXXXX").string();
    dir_ = ::mkdtemp(pattern.data());
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::string path(const std::string& name) const { return dir_ + "/" + name; }
  // `arguments` go through the shell; `prefix` runs before, in the same shell.
  Ran run(const std::string& arguments, const std::string& prefix = "") const {
    const std::string command = std::format("{} '{}/bin/kvasir' {} >'{}' 2>'{}'", prefix,
                                            environment("KVASIR_BUILD_DIR"), arguments,
                                            path("stdout"), path("stderr"));
    const int status = std::system(command.c_str());
    Ran ran{WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_text(path("stdout")), read_text(path("stderr"))};
    std::filesystem::remove(path("stdout"));
    std::filesystem::remove(path("stderr"));
    return ran;
  }
  // The command fails with one line on stderr, and leaves no file.
  void expect_refusal(const std::string& arguments, const std::string& expected, const std::string& prefix = "") const {
    const Ran ran = run(arguments, prefix);
    EXPECT_EQ(ran.status, 1) << arguments;
    EXPECT_EQ(ran.out, "") << arguments;
    EXPECT_THAT(ran.err, testing::StartsWith("kvasir: ")) << arguments;
    EXPECT_THAT(ran.err, HasSubstr(expected)) << arguments;
    EXPECT_EQ(std::ranges::count(ran.err, '\n'), 1) << ran.err;
    EXPECT_TRUE(ran.err.ends_with(".\n")) << ran.err;
    for (const auto& entry : std::filesystem::directory_iterator(dir_))
      EXPECT_FALSE(entry.path().string().contains("out.gguf")) << entry.path();
  }

  std::string dir_;
  std::string model_ = "'" + environment("KVASIR_SOURCE_DIR") + "/models/tinymoe-en-Q4_K_M.gguf'";
};

TEST_F(SliceCommand, CutsVerifiesAndInspects) {
  const std::string out = path("a slice.gguf");
  Ran ran = run(std::format("slice {} --layers 0:2 --experts 3,7,9:12 -o '{}'", model_, out));
  EXPECT_EQ(ran.status, 0) << ran.err;
  EXPECT_EQ(ran.err, "");  // no progress bar where there is no terminal
  ran = run(std::format("slice {} --verify '{}'", model_, out));
  EXPECT_EQ(ran.status, 0) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("identical to"));
  ran = run(std::format("inspect '{}'", out));
  EXPECT_EQ(ran.status, 0) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("3,7,9:12"));
  ran = run(std::format("inspect --json '{}'", out));
  const auto json = nlohmann::json::parse(ran.out);
  EXPECT_EQ(json["kind"], "slice");
  EXPECT_EQ(json["layers"].size(), 2u);
  EXPECT_EQ(json["layers"][1]["held"], nlohmann::json::parse("[[3,4],[7,8],[9,12]]"));

  std::ofstream(path("plan.json")) << R"({"layers": {"0": [[0,16],[20,21]], "3": [[5,6]]}})";
  ran = run(std::format("slice {} --plan '{}' -o '{}'", model_, path("plan.json"), out));
  EXPECT_EQ(ran.status, 0) << ran.err;
  EXPECT_THAT(run(std::format("inspect '{}'", out)).out, HasSubstr("0:16,20"));

  ran = run(std::format("slice --backbone {} -o '{}'", model_, out));
  EXPECT_EQ(ran.status, 0) << ran.err;
  EXPECT_EQ(run(std::format("slice {} --verify '{}'", model_, out)).status, 0);
}

TEST_F(SliceCommand, RefusesBadInputInOneSentence) {
  const std::string out = std::format(" -o '{}'", path("out.gguf"));
  const auto slice = [&](const std::string& rest) { return "slice " + model_ + " " + rest + out; };
  expect_refusal(std::format("slice '{}'{}", path("missing.gguf"), out), "No such file");
  expect_refusal(std::format("inspect '{}'", path("missing.gguf")), "No such file");
  expect_refusal(std::format("slice '{}'{}", dir_, out), "not a regular file");
  std::ofstream(path("text.gguf")) << "These are not weights.";
  expect_refusal(std::format("slice '{}'{}", path("text.gguf"), out), "is not a GGUF file");
  expect_refusal(slice("--layers 4"), "layer 4 does not exist; this model has layers 0:4");
  expect_refusal(slice("--experts 30:33"), "expert 32 does not exist; this model has experts 0:32");
  expect_refusal(slice("--layers 2:2"), "is empty");
  expect_refusal(slice("--experts 9:3"), "is empty");
  expect_refusal(slice("--experts many"), "is not a list of experts");
  expect_refusal(std::format("slice {}", model_), "needs -o OUT");
  expect_refusal(std::format("slice {} -o '{}'", model_, path("no/folder/out.gguf")), "No such file or directory");
  expect_refusal(slice(std::format("--plan '{}'", path("no.json"))), "cannot open the plan");
  std::ofstream(path("plan.json")) << R"({"layers": {"0": [0,16]}})";
  expect_refusal(slice(std::format("--plan '{}'", path("plan.json"))), "the plan is not of the form");
  expect_refusal(std::format("slice {} --verify {}", model_, model_), "is a whole model");
  expect_refusal(std::format("synth --n-embd 100{}", out), "multiple of 64");
  expect_refusal(std::format("synth --types gate=Q9{}", out), "is not WHAT=TYPE");

  ASSERT_EQ(run(std::format("slice {} --experts 1 -o '{}'", model_, path("other.gguf"))).status, 0);
  const std::string before = read_text(path("other.gguf"));
  expect_refusal(std::format("slice '{0}' -o '{0}'", path("other.gguf")), "is the model itself");
  EXPECT_EQ(read_text(path("other.gguf")), before);
  ASSERT_EQ(run(std::format("synth --layers 4 --experts 32 -o '{}'", path("synth.gguf"))).status, 0);
  expect_refusal(std::format("slice '{}' --verify '{}'", path("synth.gguf"), path("other.gguf")), "was not made from");
}

TEST_F(SliceCommand, ADenseModelIsRefused) {
  // The smallest there is: an architecture and one dense tensor.
  std::string bytes("GGUF\3\0\0\0\1\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0", 24);
  const auto text = [&](std::string_view s) {
    bytes += std::string(1, static_cast<char>(s.size())) + std::string(7, '\0') + std::string(s);
  };
  text("general.architecture");
  bytes += std::string("\10\0\0\0", 4);
  text("llama");
  text("output.weight");
  bytes += std::string("\1\0\0\0\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 24);
  bytes.resize((bytes.size() + 31) / 32 * 32 + 32);
  std::ofstream(path("dense.gguf"), std::ios::binary) << bytes;
  for (const char* flags : {"", "--backbone ", "--layers 0 "})
    expect_refusal(std::format("slice '{}' {}-o '{}'", path("dense.gguf"), flags, path("out.gguf")),
                   "is a dense model (llama)");
  const Ran ran = run(std::format("inspect '{}'", path("dense.gguf")));
  EXPECT_EQ(ran.status, 0) << ran.err;
  EXPECT_THAT(ran.out, HasSubstr("dense: no routed experts"));
}

TEST_F(SliceCommand, AFullDiskIsOneSentenceAndLeavesNothing) {
  // As the shell's limit on file sizes shows it, in units of 1 KiB: the path of ENOSPC.
  const std::string out = std::format("-o '{}'", path("out.gguf"));
  for (const std::string& command : {std::format("slice {} {}", model_, out),
                                     std::format("slice --backbone {} {}", model_, out),
                                     std::format("synth --experts 64 {}", out)})
    expect_refusal(command, "File too large; free some space", "ulimit -f 1000;");
}

}  // namespace
}  // namespace kvasir::cli
