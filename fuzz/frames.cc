// Whatever bytes a peer sends: frames assembled from pieces of any size, and payloads of any
// type. decode_any CHECKs what an accepted message promises.

#include <algorithm>
#include <cstdint>
#include <span>

#include "net/frame_io.h"
#include "wire/decode_any.h"

namespace {

using namespace kvasir;

// Gives its bytes in pieces of `step`, with a would-block between them.
class MemoryStream final : public net::Stream {
 public:
  MemoryStream(ByteSpan bytes, std::size_t step) : Stream(net::Fd()), bytes_(bytes), step_(step) {}

  Result<net::IoResult> read_some(std::span<std::byte> into) override {
    KVASIR_CHECK(!into.empty());
    blocked_ = !blocked_;
    if (blocked_) return net::IoResult{net::IoState::kWouldBlock, 0};
    if (bytes_.empty()) return net::IoResult{net::IoState::kEnd, 0};
    const std::size_t n = std::min({into.size(), step_, bytes_.size()});
    std::ranges::copy(bytes_.first(n), into.begin());
    bytes_ = bytes_.subspan(n);
    return net::IoResult{net::IoState::kDone, n};
  }
  Result<net::IoResult> write_some(std::span<const iovec>) override { return net::IoResult{}; }
  short wants(bool) const override { return 0; }
  bool buffered_input() const override { return false; }
  bool buffered_output() const override { return false; }
  bool encrypted() const override { return false; }
  void shutdown() override {}

 private:
  ByteSpan bytes_;
  std::size_t step_;
  bool blocked_ = false;
};

}  // namespace

// First byte: piece size, and the type of the payload that the rest is taken for.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const ByteSpan rest = std::as_bytes(std::span(data, size)).subspan(1);

  wire::decode_any(static_cast<wire::FrameType>(1 + data[0] % 11), rest);

  MemoryStream stream(rest, 1 + std::size_t{data[0]} * 7);
  net::FrameReader reader;
  while (true) {
    const auto state = reader.read(stream);
    KVASIR_CHECK(reader.buffer_bytes() <= std::max<std::size_t>(128 << 10, 2 * (size + 64)));
    if (!state || *state == net::FrameReader::State::kEnd) return 0;
    if (*state != net::FrameReader::State::kFrame) continue;
    const net::Frame& frame = reader.frame();
    KVASIR_CHECK(frame.payload.size() == frame.header.payload_bytes &&
                 frame.payload.size() <= wire::payload_bytes_max(frame.header.type));
    wire::decode_any(frame.header.type, frame.payload);
  }
}
