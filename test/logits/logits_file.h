// The file of kvasir-logits: 8 bytes "KVLOGIT1", u32 width, u32 0, then rows of `width` f32,
// in the order they were computed (prompt rows sequence by sequence, then each decode step).
// Little-endian.
#pragma once

#include <xxhash.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <format>
#include <memory>
#include <span>
#include <string>

namespace kvasir::test {

class LogitsWriter {
 public:
  // No file is written if `path` is empty; the hash is kept all the same.
  LogitsWriter(const std::string& path, std::uint32_t width) : hash_(XXH3_createState(), XXH3_freeState) {
    XXH3_128bits_reset(hash_.get());
    if (path.empty()) return;
    file_.reset(std::fopen(path.c_str(), "wb"));
    const std::uint32_t tail[2] = {width, 0};
    ok_ = file_ && std::fwrite("KVLOGIT1", 1, 8, file_.get()) == 8 && std::fwrite(tail, 4, 2, file_.get()) == 2;
  }

  void add(std::span<const float> row) {
    ++n_rows_;
    for (float value : row) all_finite_ = all_finite_ && std::isfinite(value);
    XXH3_128bits_update(hash_.get(), row.data(), row.size_bytes());
    if (file_) ok_ = ok_ && std::fwrite(row.data(), sizeof(float), row.size(), file_.get()) == row.size();
  }

  bool finish() { return ok_ && (!file_ || std::fflush(file_.get()) == 0); }

  std::uint64_t n_rows() const { return n_rows_; }
  bool all_finite() const { return all_finite_; }
  std::string hash_hex() const {
    const XXH128_hash_t digest = XXH3_128bits_digest(hash_.get());
    return std::format("{:016x}{:016x}", digest.high64, digest.low64);
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> hash_;
  std::unique_ptr<std::FILE, Close> file_;
  std::uint64_t n_rows_ = 0;
  bool all_finite_ = true;
  bool ok_ = true;
};

}  // namespace kvasir::test
