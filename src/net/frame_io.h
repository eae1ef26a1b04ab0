// Frames over a stream, for a worker's connection thread (poll with a timeout) and for a
// dispatcher's round driver (spin, then poll many). Never blocks; deadlines are the caller's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <new>
#include <span>

#include "base/bytes.h"
#include "base/error.h"
#include "net/stream.h"
#include "wire/codec.h"

namespace kvasir::net {

struct Frame {
  wire::FrameHeader header;
  ByteSpan payload;  // 8-byte aligned; stands until the reader's next call
};

// Assembles frames. One read brings header and payload together, and the next frames too if
// they are there. The buffer doubles only as it fills, so memory follows the bytes that came,
// not the length that a header claims.
class FrameReader {
 public:
  enum class State {
    kFrame,       // frame() is complete and its checksum right
    kWouldBlock,  // poll for the stream's wants()
    kEnd,         // the peer closed between frames
  };

  // A worker starts with payload_bytes_max(kHello) and raises it when HELLO is accepted.
  explicit FrameReader(std::uint32_t payload_bytes_max = wire::kFramePayloadBytesMax)
      : payload_bytes_max_(payload_bytes_max) {}

  void set_payload_bytes_max(std::uint32_t bytes) { payload_bytes_max_ = bytes; }

  // Reads until a frame is complete or the stream has nothing more. Errors (a bad header, a
  // wrong checksum, a close in mid-frame, the stream's own) are final for the connection.
  Result<State> read(Stream& stream);
  const Frame& frame() const { return frame_; }

  // Bytes that someone else has read from this stream already (the first four tell the
  // framings apart); before the first read().
  void feed(ByteSpan bytes);

  // A frame has begun and is not complete: what a caller's mid-frame deadline watches.
  bool mid_frame() const { return end_ > begin_; }
  // Of that frame, bytes here so far: whether a slow peer still makes progress.
  std::size_t mid_frame_bytes() const { return end_ - begin_; }
  std::size_t buffer_bytes() const { return capacity_; }
  // Gives the memory of past large frames back; frame() is void afterwards.
  void shrink();

 private:
  struct AlignedDelete {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t{kAlignment}); }
  };
  static constexpr std::size_t kAlignment = 64;
  static constexpr std::size_t kPayloadAlignment = 8;

  Result<bool> take_frame();     // true: frame_ is set
  void make_room();              // at least one byte behind end_, without passing the frame's end needlessly
  void grow(std::size_t capacity);

  std::unique_ptr<std::byte[], AlignedDelete> buffer_;
  std::size_t capacity_ = 0;
  std::size_t begin_ = 0;  // unparsed bytes are [begin_, end_)
  std::size_t end_ = 0;
  std::uint32_t payload_bytes_max_;
  bool have_header_ = false;
  Frame frame_;
};

// Sends frames. What the socket takes at once is never copied; only the rest is queued.
class FrameWriter {
 public:
  static constexpr std::size_t kQueuedBytesMax = 128u << 20;

  explicit FrameWriter(std::size_t queued_bytes_max = kQueuedBytesMax) : queued_bytes_max_(queued_bytes_max) {}

  // `prefix` and `rows` need to live during the call only: what is not sent is copied.
  // kRetryLater, with nothing sent, if earlier bytes still wait and these would pass the
  // limit. Any other error is final for the connection.
  Status send(Stream& stream, ByteSpan prefix, ByteSpan rows = {});
  // Likewise, but nothing of `rows` is ever copied: `owner` keeps them alive in the queue.
  Status send_shared(Stream& stream, ByteSpan prefix, ByteSpan rows, std::shared_ptr<const void> owner);

  // Goes on with what is queued: true when all of it has left, false when the socket is full.
  Result<bool> flush(Stream& stream);
  bool idle(const Stream& stream) const { return queue_.empty() && !stream.buffered_output(); }
  std::size_t queued_bytes() const { return queued_bytes_; }

 private:
  struct Chunk {
    std::shared_ptr<const void> owner;
    ByteSpan bytes;
  };

  Status send_parts(Stream& stream, ByteSpan prefix, ByteSpan rows, std::shared_ptr<const void> owner);
  void enqueue_copy(ByteSpan bytes);

  std::size_t queued_bytes_max_;
  std::size_t queued_bytes_ = 0;
  std::deque<Chunk> queue_;
};

}  // namespace kvasir::net
