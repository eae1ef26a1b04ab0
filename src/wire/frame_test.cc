#include <gtest/gtest.h>

#include <array>

#include "wire/checksum_kernels.h"
#include "wire/codec.h"

namespace kvasir::wire {
namespace {

using Header = std::array<std::byte, kHeaderBytes>;

Header encoded(const FrameHeader& header) {
  Header bytes;
  encode_header(header, bytes);
  return bytes;
}

TEST(Frame, HeaderRoundTrip) {
  const FrameHeader header{.type = FrameType::kResult,
                           .flags = kFlagChecksum | kFlagMore,
                           .request_id = 0x1122334455667788,
                           .payload_bytes = 24,
                           .checksum = 7};
  EXPECT_EQ(*decode_header(encoded(header)), header);
}

TEST(Frame, EveryTypeHasItsLengthLimit) {
  for (int type = 1; type <= 11; ++type) {
    FrameHeader header{.type = static_cast<FrameType>(type),
                       .payload_bytes = payload_bytes_max(static_cast<FrameType>(type))};
    EXPECT_LE(header.payload_bytes, kFramePayloadBytesMax);
    EXPECT_TRUE(decode_header(encoded(header))) << type;
    ++header.payload_bytes;
    EXPECT_FALSE(decode_header(encoded(header))) << type;
  }
}

TEST(Frame, BadHeadersAreRefused) {
  const Header good = encoded({.type = FrameType::kPing, .payload_bytes = 8});
  ASSERT_TRUE(decode_header(good));
  const auto with = [&](std::size_t at, unsigned value) {
    Header bad = good;
    bad[at] = static_cast<std::byte>(value);
    return decode_header(bad);
  };
  for (std::size_t at = 0; at < 4; ++at) EXPECT_FALSE(with(at, 0));
  for (unsigned type : {0u, 12u, 255u}) EXPECT_FALSE(with(6, type));
  for (unsigned flags : {2u, 4u, 128u}) EXPECT_FALSE(with(7, flags));  // MORE is RESULT's alone
  EXPECT_FALSE(with(19, 0xff));
  EXPECT_FALSE(with(20, 1));  // a checksum without its flag
}

TEST(Frame, AnotherVersionIsNamed) {
  const auto refused = decode_header(encoded({.version = 7, .type = FrameType::kPing, .payload_bytes = 8}));
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("version 7"), std::string::npos);
  EXPECT_NE(refused.error().message.find("version 1"), std::string::npos);
}

TEST(Frame, ChecksumOfTwoPartsIsThatOfTheWhole) {
  Bytes whole(5000);
  for (std::size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<std::byte>(i * 31);
  for (std::size_t cut : {0, 1, 24, 88, 240, 256, 4999, 5000})
    EXPECT_EQ(payload_checksum(ByteSpan(whole).first(cut), ByteSpan(whole).subspan(cut)), payload_checksum(whole))
        << cut;
}

// Each build of the loops gives the same bits.
TEST(Frame, ChecksumBuildsAgree) {
  const ChecksumKernels& a = kBaselineChecksumKernels;
  const ChecksumKernels& b = best_checksum_kernels();
  Bytes whole(20'000);
  for (std::size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<std::byte>(i * i * 31 + i / 7);
  for (std::size_t n = 0; n < 300; ++n) ASSERT_EQ(a.whole(whole.data(), n), b.whole(whole.data(), n)) << n;
  for (const std::size_t n : {1024u, 1025u, 4096u, 5000u, 12'312u, 20'000u}) {
    EXPECT_EQ(a.whole(whole.data(), n), b.whole(whole.data(), n)) << n;
    EXPECT_EQ(a.whole(whole.data(), n), b.parts(whole.data(), 24, whole.data() + 24, n - 24)) << n;
    EXPECT_EQ(b.whole(whole.data(), n), a.parts(whole.data(), 88, whole.data() + 88, n - 88)) << n;
  }
}

TEST(Frame, EveryFlippedBitOfThePayloadIsFound) {
  Bytes frame = encode_frame(FrameType::kPong, 1, Pong{.sent_ns = 5, .queued = 1}, true);
  const FrameHeader header = *decode_header(std::span(frame).first<kHeaderBytes>());
  for (std::size_t bit = 0; bit < kPongBytes * 8; ++bit) {
    frame[kHeaderBytes + bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    EXPECT_FALSE(checksum_matches(header, ByteSpan(frame).subspan(kHeaderBytes)));
    frame[kHeaderBytes + bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
  }
  EXPECT_TRUE(checksum_matches(header, ByteSpan(frame).subspan(kHeaderBytes)));
}

}  // namespace
}  // namespace kvasir::wire
