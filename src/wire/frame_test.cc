#include <gtest/gtest.h>

#include "wire/codec.h"

namespace kvasir::wire {
namespace {

TEST(Frame, HeaderRoundTrip) {
  FrameHeader header{.type = FrameType::kResult, .flags = kFlagChecksum | kFlagMore, .request_id = 0x1122334455667788,
                     .payload_bytes = 24, .checksum = 7};
  std::array<std::byte, kHeaderBytes> bytes{};
  encode_header(header, bytes);
  EXPECT_EQ(*decode_header(bytes), header);
}

TEST(Frame, ChecksumOfTwoPartsIsThatOfTheWhole) {
  Bytes whole(5000);
  for (std::size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<std::byte>(i * 31);
  for (std::size_t cut : {0, 1, 24, 88, 240, 256, 4999, 5000})
    EXPECT_EQ(payload_checksum(ByteSpan(whole).first(cut), ByteSpan(whole).subspan(cut)), payload_checksum(whole)) << cut;
}

}  // namespace
}  // namespace kvasir::wire
