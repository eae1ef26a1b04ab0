#include "net/websocket_frames.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

namespace kvasir::net::websocket {
namespace {

using ::testing::HasSubstr;

Bytes bytes_of(std::initializer_list<int> values) {
  Bytes out;
  for (const int value : values) out.push_back(static_cast<std::byte>(value));
  return out;
}
Bytes text(std::string_view s) {
  const ByteSpan bytes = std::as_bytes(std::span(s));
  return {bytes.begin(), bytes.end()};
}
Bytes frame(Op op, bool fin, Bytes payload, const MaskKey* key = nullptr) {
  HeaderBytes header;
  const std::size_t n = encode_header(header, op, fin, payload.size(), key);
  if (key != nullptr) mask(payload, *key, 0);
  Bytes out(header.begin(), header.begin() + static_cast<std::ptrdiff_t>(n));
  out.insert(out.end(), payload.begin(), payload.end());
  return out;
}
Bytes operator+(Bytes a, const Bytes& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

struct Seen {
  Bytes data;
  std::vector<std::size_t> ends;  // of messages, in `data`
  std::vector<std::pair<Op, Bytes>> controls;
  std::string error;
};
Seen parse(Bytes bytes, std::size_t step, Parser::From from = Parser::From::kServer) {
  Parser parser(from);
  Seen out;
  for (std::size_t at = 0; at < bytes.size() && out.error.empty(); at += step) {
    std::span<std::byte> some = std::span(bytes).subspan(at, std::min(step, bytes.size() - at));
    while (true) {
      const auto got = parser.next(some);
      if (!got) out.error = got.error().message;
      if (!got || !*got) break;
      const auto& piece = **got;
      const Bytes payload(piece.payload.begin(), piece.payload.end());
      if (piece.is_control()) {
        out.controls.emplace_back(piece.op, payload);
        continue;
      }
      out.data.insert(out.data.end(), payload.begin(), payload.end());
      if (piece.message_done) out.ends.push_back(out.data.size());
    }
    EXPECT_TRUE(some.empty() || !out.error.empty());
  }
  return out;
}

// The examples of RFC 6455, section 5.7.
TEST(WebSocketFrames, TheExamplesOfTheStandard) {
  EXPECT_EQ(frame(Op::kText, true, text("Hello")), bytes_of({0x81, 0x05, 0x48, 0x65, 0x6c, 0x6c, 0x6f}));
  const MaskKey key = {std::byte{0x37}, std::byte{0xfa}, std::byte{0x21}, std::byte{0x3d}};
  const Bytes masked = bytes_of({0x81, 0x85, 0x37, 0xfa, 0x21, 0x3d, 0x7f, 0x9f, 0x4d, 0x51, 0x58});
  EXPECT_EQ(frame(Op::kText, true, text("Hello"), &key), masked);
  EXPECT_EQ(parse(masked, 3, Parser::From::kClient).data, text("Hello"));
  EXPECT_EQ(control_frame(Op::kPing, text("Hello"), nullptr), bytes_of({0x89, 0x05, 0x48, 0x65, 0x6c, 0x6c, 0x6f}));
  EXPECT_EQ(control_frame(Op::kPong, text("Hello"), &key),
            bytes_of({0x8a, 0x85, 0x37, 0xfa, 0x21, 0x3d, 0x7f, 0x9f, 0x4d, 0x51, 0x58}));
  HeaderBytes header;
  EXPECT_EQ(encode_header(header, Op::kBinary, true, 256, nullptr), 4u);
  EXPECT_EQ(Bytes(header.begin(), header.begin() + 4), bytes_of({0x82, 0x7e, 0x01, 0x00}));
  EXPECT_EQ(encode_header(header, Op::kBinary, true, 65536, nullptr), 10u);
  EXPECT_EQ(Bytes(header.begin(), header.begin() + 10), bytes_of({0x82, 0x7f, 0, 0, 0, 0, 0, 1, 0, 0}));
}

// Whatever the pieces in which bytes come, the masks, and what stands between the frames.
TEST(WebSocketFrames, PiecesOfAnySizeGiveTheSame) {
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    const bool client = round % 2 == 0;
    Bytes stream, data;
    std::vector<std::size_t> ends;
    for (int i = 0; i < 6; ++i) {
      Bytes payload(std::array<std::size_t, 6>{0, 1, 125, 126, 5'000, 70'000}[random() % 6]);
      for (std::byte& byte : payload) byte = static_cast<std::byte>(random());
      MaskKey key{};
      if (random() % 2 == 0)
        for (std::byte& byte : key) byte = static_cast<std::byte>(random());
      // A message of two frames, with a ping between them.
      const std::size_t cut = payload.empty() ? 0 : random() % payload.size();
      const MaskKey* with = client ? &key : nullptr;
      const auto middle = payload.begin() + static_cast<std::ptrdiff_t>(cut);
      stream = stream + frame(Op::kBinary, false, Bytes(payload.begin(), middle), with) +
               control_frame(Op::kPing, text("?"), with) +
               frame(Op::kContinuation, true, Bytes(middle, payload.end()), with);
      data = data + payload;
      ends.push_back(data.size());
    }
    for (const std::size_t step : {std::size_t{1}, std::size_t{7}, std::size_t{4'096}, stream.size()}) {
      const Seen seen = parse(stream, step, client ? Parser::From::kClient : Parser::From::kServer);
      EXPECT_EQ(seen.error, "");
      EXPECT_TRUE(seen.data == data) << step;
      EXPECT_EQ(seen.ends, ends);
      EXPECT_EQ(seen.controls.size(), 6u);
    }
  }
}

TEST(WebSocketFrames, ClosesSayWhy) {
  const Seen seen = parse(close_frame(4410, "the other end is gone", nullptr), 1);
  ASSERT_EQ(seen.controls.size(), 1u);
  EXPECT_EQ(parse_close(seen.controls[0].second).code, 4410);
  EXPECT_EQ(parse_close(seen.controls[0].second).reason, "the other end is gone");
  EXPECT_EQ(parse_close({}).code, 1005);
  // Cut, so that the frame stays a control frame.
  EXPECT_EQ(close_frame(1000, std::string(500, 'x'), nullptr).size(), 2 + kControlBytesMax);
}

TEST(WebSocketFrames, BrokenRulesAreRefused) {
  const auto refused = [](Bytes bytes, Parser::From from, const char* why) {
    EXPECT_THAT(parse(std::move(bytes), 1, from).error, HasSubstr(why));
  };
  using enum Parser::From;
  const MaskKey key{};
  refused(bytes_of({0xc2, 0x00}), kServer, "reserved");
  refused(bytes_of({0x83, 0x00}), kServer, "unknown kind");
  refused(bytes_of({0x8b, 0x00}), kServer, "unknown kind");
  refused(frame(Op::kBinary, true, text("no mask")), kClient, "no mask");
  refused(frame(Op::kBinary, true, text("x"), &key), kServer, "has a mask");
  refused(bytes_of({0x89, 0x7e, 0x00, 0x80}), kServer, "too long");
  refused(bytes_of({0x09, 0x00}), kServer, "too long");  // in fragments
  refused(bytes_of({0x82, 0x7e, 0x00, 0x05}), kServer, "length");
  refused(bytes_of({0x82, 0x7f, 0, 0, 0, 0, 0, 0, 0xff, 0xff}), kServer, "length");
  refused(bytes_of({0x82, 0x7f, 0x80, 0, 0, 0, 0, 1, 0, 0}), kServer, "length");
  refused(bytes_of({0x80, 0x00}), kServer, "has not begun");
  refused(bytes_of({0x02, 0x00, 0x82, 0x00}), kServer, "inside another");
}

// What is carried past the parser counts as if it had been read.
TEST(WebSocketFrames, SkippedBytesCount) {
  MaskKey key{};
  Bytes bytes = frame(Op::kBinary, false, Bytes(100'000), &key);
  std::span<std::byte> header = std::span(bytes).first(kHeaderBytesMax);
  Parser parser(Parser::From::kClient);
  const auto none = parser.next(header);
  ASSERT_TRUE(none && !*none);
  EXPECT_EQ(parser.payload_left(), 100'000u);
  EXPECT_TRUE(parser.payload_is_bare());
  EXPECT_FALSE(parser.skip(60'000).message_done);
  EXPECT_EQ(parser.payload_left(), 40'000u);
  EXPECT_FALSE(parser.skip(40'000).message_done);  // the frame's end is not the message's
  EXPECT_EQ(parser.payload_left(), 0u);
  Bytes end = frame(Op::kContinuation, true, text("x"), &key);
  std::span<std::byte> rest(end);
  EXPECT_TRUE((*parser.next(rest))->message_done);
  key[2] = std::byte{1};
  Bytes masked = frame(Op::kBinary, true, Bytes(100'000), &key);
  rest = std::span(masked).first(kHeaderBytesMax);
  ASSERT_TRUE(parser.next(rest));
  EXPECT_FALSE(parser.payload_is_bare());
}

}  // namespace
}  // namespace kvasir::net::websocket
