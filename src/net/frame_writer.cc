#include <algorithm>
#include <array>
#include <format>

#include "net/frame_io.h"

namespace kvasir::net {
namespace {

iovec part_of(ByteSpan bytes) { return {const_cast<std::byte*>(bytes.data()), bytes.size()}; }  // only read from

}  // namespace

Status FrameWriter::send(Stream& stream, ByteSpan prefix, ByteSpan rows) {
  return send_parts(stream, prefix, rows, nullptr);
}

Status FrameWriter::send_shared(Stream& stream, ByteSpan prefix, ByteSpan rows, std::shared_ptr<const void> owner) {
  return send_parts(stream, prefix, rows, std::move(owner));
}

void FrameWriter::enqueue_copy(ByteSpan bytes) {
  if (bytes.empty()) return;
  auto copy = std::make_shared_for_overwrite<std::byte[]>(bytes.size());
  std::ranges::copy(bytes, copy.get());
  const ByteSpan held(copy.get(), bytes.size());
  queue_.push_back({std::move(copy), held});
  queued_bytes_ += bytes.size();
}

Status FrameWriter::send_parts(Stream& stream, ByteSpan prefix, ByteSpan rows, std::shared_ptr<const void> owner) {
  if (!queue_.empty()) KVASIR_TRY(flush(stream));
  if (queue_.empty()) {
    // One frame is always taken by an empty queue, whatever its limit.
    while (!prefix.empty() || !rows.empty()) {
      const std::array<iovec, 2> parts = {part_of(prefix), part_of(rows)};
      KVASIR_ASSIGN(const IoResult sent, stream.write_some(parts));
      if (sent.state != IoState::kDone) break;
      const std::size_t of_prefix = std::min(sent.bytes, prefix.size());
      prefix = prefix.subspan(of_prefix);
      rows = rows.subspan(sent.bytes - of_prefix);
    }
  } else if (const std::size_t size = prefix.size() + rows.size();
             size > queued_bytes_max_ || queued_bytes_ > queued_bytes_max_ - size) {
    return retry_later(std::format("the peer reads too slowly: {} bytes wait for it; send to another.", queued_bytes_));
  }
  enqueue_copy(prefix);
  if (owner == nullptr) {
    enqueue_copy(rows);
  } else if (!rows.empty()) {
    queue_.push_back({std::move(owner), rows});
    queued_bytes_ += rows.size();
  }
  return {};
}

Result<bool> FrameWriter::flush(Stream& stream) {
  constexpr std::size_t kPartsMax = 16;
  while (!queue_.empty()) {
    std::array<iovec, kPartsMax> parts;
    const std::size_t n = std::min(kPartsMax, queue_.size());
    for (std::size_t i = 0; i < n; ++i) parts[i] = part_of(queue_[i].bytes);
    KVASIR_ASSIGN(const IoResult sent, stream.write_some(std::span(parts).first(n)));
    if (sent.state != IoState::kDone) return false;
    queued_bytes_ -= sent.bytes;
    for (std::size_t left = sent.bytes; left > 0;) {
      ByteSpan& front = queue_.front().bytes;
      const std::size_t taken = std::min(left, front.size());
      front = front.subspan(taken);
      left -= taken;
      if (front.empty()) queue_.pop_front();
    }
  }
  if (!stream.buffered_output()) return true;
  KVASIR_TRY(stream.write_some({}));
  return !stream.buffered_output();
}

}  // namespace kvasir::net
