#include <format>

#include "wire/codec.h"

namespace kvasir::wire {
namespace {

// u16 length and the text.
constexpr std::uint32_t kTextFieldBytesMax = 2 + kTextBytesMax;

}  // namespace

std::uint32_t payload_bytes_max(FrameType type) {
  switch (type) {
    case FrameType::kHello: return kHelloFixedBytes + 4 * kTextFieldBytesMax;
    case FrameType::kHoldings: return kHoldingsFixedBytes + kHoldingsMax * kHoldingFixedBytes + kHoldingsRangesMax * kRangeBytes;
    case FrameType::kLayerRecipe: return kLayerRecipeBytes;
    case FrameType::kExec: return kFramePayloadBytesMax;
    case FrameType::kResult: return kResultPayloadBytesMax;
    case FrameType::kError: return 2 + kTextFieldBytesMax;
    case FrameType::kCancel: return 0;
    case FrameType::kPing: return kPingBytes;
    case FrameType::kPong: return kPongBytes;
    case FrameType::kDrain: return 0;
    case FrameType::kUpload: return kUploadHeadBytes + kUploadChunkBytes;
  }
  return 0;
}

void encode_header(const FrameHeader& header, std::span<std::byte, kHeaderBytes> out) {
  store_le(out.data() + 0, kMagic);
  store_le(out.data() + 4, header.version);
  store_le(out.data() + 6, header.type);
  store_le(out.data() + 7, header.flags);
  store_le(out.data() + 8, header.request_id);
  store_le(out.data() + 16, header.payload_bytes);
  store_le(out.data() + 20, header.checksum);
}

Result<FrameHeader> decode_header(std::span<const std::byte, kHeaderBytes> bytes) {
  if (load_le<std::uint32_t>(bytes.data()) != kMagic)
    return retry_elsewhere("the peer does not speak Kvasir's protocol (wrong magic); check the host and port.");
  FrameHeader header;
  header.version = load_le<std::uint16_t>(bytes.data() + 4);
  if (header.version != kProtocolVersion)
    return retry_elsewhere(std::format("the peer speaks version {} of Kvasir's protocol and this program version {}; "
                                       "install the same version of Kvasir on both ends.",
                                       header.version, kProtocolVersion));
  const auto type = load_le<std::uint8_t>(bytes.data() + 6);
  if (type < static_cast<std::uint8_t>(FrameType::kHello) || type > static_cast<std::uint8_t>(FrameType::kUpload))
    return retry_elsewhere(std::format("the peer sent a frame of unknown type {}; drop the connection.", type));
  header.type = static_cast<FrameType>(type);
  header.flags = load_le<std::uint8_t>(bytes.data() + 7);
  const unsigned allowed = header.type == FrameType::kResult ? kFlagChecksum | kFlagMore : kFlagChecksum;
  if ((header.flags & ~allowed) != 0)
    return retry_elsewhere(std::format(
        "the peer sent a frame of type {} with unknown flags {:#x}; drop the connection.", type, header.flags));
  header.request_id = load_le<std::uint64_t>(bytes.data() + 8);
  header.payload_bytes = load_le<std::uint32_t>(bytes.data() + 16);
  if (header.payload_bytes > payload_bytes_max(header.type))
    return retry_elsewhere(
        std::format("the peer sent a frame of type {} with {} bytes, the limit is {}; drop the connection.", type,
                    header.payload_bytes, payload_bytes_max(header.type)));
  header.checksum = load_le<std::uint32_t>(bytes.data() + 20);
  if ((header.flags & kFlagChecksum) == 0 && header.checksum != 0)
    return retry_elsewhere("the peer sent a checksum without its flag; drop the connection.");
  return header;
}

bool checksum_matches(const FrameHeader& header, ByteSpan payload) {
  return (header.flags & kFlagChecksum) == 0 || header.checksum == payload_checksum(payload);
}

Bytes frame_of(FrameType type, std::uint64_t request_id, ByteSpan payload, bool checksum) {
  FrameHeader header{
      .type = type, .request_id = request_id, .payload_bytes = static_cast<std::uint32_t>(payload.size())};
  if (checksum) {
    header.flags = kFlagChecksum;
    header.checksum = payload_checksum(payload);
  }
  Bytes frame(kHeaderBytes);
  frame.reserve(kHeaderBytes + payload.size());
  encode_header(header, std::span(frame).first<kHeaderBytes>());
  frame.insert(frame.end(), payload.begin(), payload.end());
  return frame;
}

Bytes encode_empty_frame(FrameType type, std::uint64_t request_id) { return frame_of(type, request_id, {}, false); }

}  // namespace kvasir::wire
