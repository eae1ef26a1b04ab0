// Shared by the tests of this room: temporary folders, small models made in memory.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <format>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/hex.h"
#include "gguf/header_builder.h"
#include "gguf/moe_model.h"

namespace kvasir::gguf {

class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "kvasir-test-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::size_t file_count() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
  }

 private:
  std::filesystem::path path_;
};

inline std::string real_model_path() {
  const char* source_dir = std::getenv("KVASIR_SOURCE_DIR");
  return std::string(source_dir ? source_dir : ".") + "/models/tinymoe-en-Q4_K_M.gguf";
}

inline Bytes read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::vector<char> chars{std::istreambuf_iterator<char>(in), {}};
  const auto bytes = std::as_bytes(std::span(chars));
  return {bytes.begin(), bytes.end()};
}

inline void write_file(const std::string& path, ByteSpan bytes) {
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

// A GGUF in memory whose tensor data are random bytes.
class TestModel {
 public:
  explicit TestModel(std::string architecture = "testmoe") {
    header_.add_string("general.architecture", architecture);
    header_.add_string("general.name", "test model");
  }
  HeaderBuilder& header() { return header_; }
  void add(const std::string& name, ggml_type type, Shape ne) {
    const std::uint64_t offset = header_.add_tensor(name, type, ne);
    data_.resize(static_cast<std::size_t>(header_.data_bytes()));
    for (std::uint64_t i = 0; i < *tensor_bytes(type, ne); ++i)
      data_[static_cast<std::size_t>(offset + i)] = static_cast<std::byte>(random_());
  }
  Bytes bytes() const {
    Bytes out = header_.header();
    out.insert(out.end(), data_.begin(), data_.end());
    return out;
  }

 private:
  HeaderBuilder header_;
  Bytes data_;
  std::mt19937 random_{7};
};

// Two layers with every kind of side tensor and a second group, n_expert 8 (4 chunk experts);
// layer 1 has other types and 6 experts.
inline Bytes side_tensor_model() {
  TestModel model;
  model.header().add_u32("testmoe.block_count", 3);
  model.header().add_u32("testmoe.embedding_length", 64);
  model.header().add_u32("testmoe.expert_count", 8);
  model.header().add_u32("testmoe.expert_used_count", 2);
  model.add("token_embd.weight", GGML_TYPE_F32, {64, 10, 1, 1});
  for (const char* role : {"gate", "up"}) {
    model.add(std::format("blk.0.ffn_{}_exps.weight", role), GGML_TYPE_Q8_0, {64, 32, 8, 1});
    model.add(std::format("blk.0.ffn_{}_exps.bias", role), GGML_TYPE_F32, {32, 8, 1, 1});
    model.add(std::format("blk.0.ffn_{}_chexps.weight", role), GGML_TYPE_Q4_0, {64, 32, 4, 1});
  }
  model.add("blk.0.ffn_down_exps.weight", GGML_TYPE_Q8_0, {32, 64, 8, 1});
  model.add("blk.0.ffn_down_exps.bias", GGML_TYPE_F32, {64, 8, 1, 1});
  model.add("blk.0.ffn_down_exps.scale", GGML_TYPE_F32, {8, 1, 1, 1});
  model.add("blk.0.ffn_down_exps.input_scale", GGML_TYPE_F32, {3, 1, 1, 1});  // not per expert
  model.add("blk.0.ffn_down_chexps.weight", GGML_TYPE_Q4_0, {32, 64, 4, 1});
  model.add("blk.0.ffn_gate_inp.weight", GGML_TYPE_F32, {64, 8, 1, 1});
  model.add("blk.1.ffn_gate_up_exps.weight", GGML_TYPE_F16, {64, 64, 6, 1});
  model.add("blk.1.ffn_down_exps.weight", GGML_TYPE_BF16, {32, 64, 6, 1});
  model.add("blk.1.ffn_norm_exps.weight", GGML_TYPE_F32, {64, 6, 1, 1});
  model.add("blk.2.ffn_up.weight", GGML_TYPE_F32, {64, 32, 1, 1});
  return model.bytes();
}

inline MoeModel open_memory(const std::string& name, ByteSpan bytes) {
  auto files = ModelFiles::from_source(make_memory_source(name, bytes));
  if (!files) throw std::runtime_error(files.error().message);
  auto model = MoeModel::from_files(*std::move(files));
  if (!model) throw std::runtime_error(model.error().message);
  return *std::move(model);
}

template <typename T>
std::string message_of(const Result<T>& result) {
  return result ? "no error" : result.error().message;
}

// An error is one sentence: it ends in one full stop and holds no other line.
inline void expect_one_sentence(const std::string& message) {
  EXPECT_TRUE(message.ends_with(".")) << message;
  EXPECT_FALSE(message.ends_with("..")) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

}  // namespace kvasir::gguf
