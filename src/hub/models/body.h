// The body of an answer that is put together from files while it is sent: ranges of open
// files, bytes in memory, and zeros. Nothing of it is copied before it is needed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"

namespace kvasir::hub {

struct BodyPiece {
  enum class Kind : std::uint8_t { kMemory, kFile, kZeros };
  Kind kind = Kind::kZeros;
  int fd = -1;               // kFile
  std::uint64_t offset = 0;  // in the file or in `bytes`
  std::uint64_t size = 0;
  std::shared_ptr<const Bytes> bytes;  // kMemory
};

struct Body {
  std::vector<BodyPiece> pieces;
  std::uint64_t size = 0;
  std::shared_ptr<const void> owner;     // keeps the files open
  std::function<Status()> check;         // whether the files are still what they were; asked while sending

  void append(BodyPiece piece) {
    if (piece.size == 0) return;
    size += piece.size;
    pieces.push_back(std::move(piece));
  }
  void append_memory(std::shared_ptr<const Bytes> bytes) {
    const std::uint64_t n = bytes->size();
    append({BodyPiece::Kind::kMemory, -1, 0, n, std::move(bytes)});
  }
  void append_file(int fd, std::uint64_t offset, std::uint64_t n) {
    append({BodyPiece::Kind::kFile, fd, offset, n, nullptr});
  }
  void append_zeros(std::uint64_t n) { append({BodyPiece::Kind::kZeros, -1, 0, n, nullptr}); }

  // Appends bytes [begin, end) of another body; they must be inside it.
  void append_range(const Body& from, std::uint64_t begin, std::uint64_t end) {
    std::uint64_t at = 0;
    for (const BodyPiece& piece : from.pieces) {
      const std::uint64_t low = std::max(begin, at), high = std::min(end, at + piece.size);
      if (low < high) {
        BodyPiece part = piece;
        part.offset += low - at;
        part.size = high - low;
        append(std::move(part));
      }
      at += piece.size;
      if (at >= end) break;
    }
  }
};

}  // namespace kvasir::hub
