#include <algorithm>
#include <cstring>
#include <format>

#include "base/check.h"
#include "net/frame_io.h"

namespace kvasir::net {
namespace {

// A decode-size frame (8 rows of 12 KB) comes with one read and no growth.
constexpr std::size_t kFirstBufferBytes = 128 << 10;
// The first frame starts here, so that its payload is aligned.
constexpr std::size_t kFirstFrameAt = 64 - wire::kHeaderBytes;

}  // namespace

void FrameReader::grow(std::size_t capacity) {
  std::unique_ptr<std::byte[], AlignedDelete> larger(
      static_cast<std::byte*>(::operator new(capacity, std::align_val_t{kAlignment})));
  const std::size_t used = end_ - begin_;
  if (used > 0) std::memcpy(larger.get() + kFirstFrameAt, buffer_.get() + begin_, used);
  buffer_ = std::move(larger);
  capacity_ = capacity;
  begin_ = kFirstFrameAt;
  end_ = kFirstFrameAt + used;
}

void FrameReader::make_room() {
  if (capacity_ == 0) grow(kFirstBufferBytes);
  const std::size_t whole = wire::kHeaderBytes + (have_header_ ? frame_.header.payload_bytes : 0);
  if (begin_ == end_) {
    begin_ = end_ = kFirstFrameAt;
  } else if (begin_ != kFirstFrameAt && begin_ + whole > capacity_) {
    // The last frame in the buffer has no room behind the others: to the front with it.
    std::memmove(buffer_.get() + kFirstFrameAt, buffer_.get() + begin_, end_ - begin_);
    end_ = kFirstFrameAt + (end_ - begin_);
    begin_ = kFirstFrameAt;
  }
  if (end_ == capacity_) {
    const std::size_t needed = kFirstFrameAt + whole;
    grow(std::min(2 * capacity_, std::max(needed, capacity_ + 1)));
  }
}

Result<bool> FrameReader::take_frame() {
  const std::size_t available = end_ - begin_;
  if (!have_header_) {
    if (available < wire::kHeaderBytes) return false;
    KVASIR_ASSIGN(frame_.header, wire::decode_header(std::span<const std::byte, wire::kHeaderBytes>(
                                     buffer_.get() + begin_, wire::kHeaderBytes)));
    if (frame_.header.payload_bytes > payload_bytes_max_)
      return retry_elsewhere(std::format("the peer sent a frame of {} bytes where {} are allowed; drop the connection.",
                                         frame_.header.payload_bytes, payload_bytes_max_));
    have_header_ = true;
  }
  const std::size_t size = frame_.header.payload_bytes;
  if (available < wire::kHeaderBytes + size) return false;

  // A frame behind one of odd length is moved down by a few bytes, over bytes already used.
  std::byte* payload = buffer_.get() + begin_ + wire::kHeaderBytes;
  const std::size_t offset = (begin_ + wire::kHeaderBytes) % kPayloadAlignment;
  if (offset != 0 && size > 0) std::memmove(payload - offset, payload, size);
  frame_.payload = ByteSpan(payload - offset, size);
  begin_ += wire::kHeaderBytes + size;
  have_header_ = false;
  if (!wire::checksum_matches(frame_.header, frame_.payload))
    return retry_elsewhere("a frame arrived damaged (wrong checksum); drop the connection.");
  return true;
}

Result<FrameReader::State> FrameReader::read(Stream& stream) {
  while (true) {
    KVASIR_ASSIGN(const bool complete, take_frame());
    if (complete) return State::kFrame;
    make_room();
    // With the header known, stop at the frame's end: what lies behind would only be moved.
    std::size_t room = capacity_ - end_;
    if (have_header_)
      room = std::min(room, begin_ + wire::kHeaderBytes + frame_.header.payload_bytes - end_);
    KVASIR_ASSIGN(const IoResult got, stream.read_some({buffer_.get() + end_, room}));
    if (got.state == IoState::kWouldBlock) return State::kWouldBlock;
    if (got.state == IoState::kEnd) {
      if (!mid_frame()) return State::kEnd;
      return retry_elsewhere("the peer closed the connection in the middle of a frame; try another.");
    }
    end_ += got.bytes;
  }
}

void FrameReader::feed(ByteSpan bytes) {
  KVASIR_CHECK(!have_header_ && bytes.size() <= kFirstBufferBytes - kFirstFrameAt);
  if (capacity_ == 0) grow(kFirstBufferBytes);
  KVASIR_CHECK(begin_ == end_);
  begin_ = kFirstFrameAt;
  end_ = begin_ + bytes.size();
  if (!bytes.empty()) std::memcpy(buffer_.get() + begin_, bytes.data(), bytes.size());
}

void FrameReader::shrink() {
  if (capacity_ > kFirstBufferBytes && end_ - begin_ <= kFirstBufferBytes - kFirstFrameAt && !have_header_) {
    frame_.payload = {};
    grow(kFirstBufferBytes);
  }
}

}  // namespace kvasir::net
