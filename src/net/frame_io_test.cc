#include "net/frame_io.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <array>

#include "net/stream_pair.h"

namespace kvasir::net {
namespace {

using State = FrameReader::State;

// A frame whose payload is opaque here: EXEC has the widest limit.
Bytes frame_of_size(std::size_t size, std::uint64_t request_id, bool checksum = true) {
  return wire::frame_of(wire::FrameType::kExec, request_id, pattern(size, static_cast<unsigned>(request_id)), checksum);
}

void expect_frame(const Frame& frame, std::size_t size, std::uint64_t request_id) {
  EXPECT_EQ(frame.header.request_id, request_id);
  ASSERT_EQ(frame.payload.size(), size);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(frame.payload.data()) % 8, 0u);
  EXPECT_TRUE(std::ranges::equal(frame.payload, pattern(size, static_cast<unsigned>(request_id))));
}

void write_all(Stream& to, ByteSpan bytes) {
  while (!bytes.empty()) {
    const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
    const IoResult sent = *to.write_some({&part, 1});
    ASSERT_EQ(sent.state, IoState::kDone);
    bytes = bytes.subspan(sent.bytes);
  }
}

class FrameIo : public testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Streams, FrameIo, testing::Values(Kind::kPlain, Kind::kTls), kind_name);

TEST_P(FrameIo, OneFrameThere) {
  StreamPair pair = stream_pair(GetParam(), 1 << 20);
  FrameWriter writer;
  FrameReader reader;
  EXPECT_EQ(*reader.read(*pair.server), State::kWouldBlock);
  const Bytes frame = frame_of_size(98304, 7);
  ASSERT_TRUE(writer.send(*pair.client, ByteSpan(frame).first(136), ByteSpan(frame).subspan(136)));
  EXPECT_TRUE(writer.idle(*pair.client));
  ASSERT_EQ(*reader.read(*pair.server), State::kFrame);
  expect_frame(reader.frame(), 98304, 7);
  EXPECT_FALSE(reader.mid_frame());
  EXPECT_EQ(*reader.read(*pair.server), State::kWouldBlock);
}

TEST_P(FrameIo, ByteByByte) {
  StreamPair pair = stream_pair(GetParam());
  FrameReader reader;
  std::uint64_t id = 1;
  for (std::size_t size : {0, 1, 63, 64, 1000}) {
    const Bytes frame = frame_of_size(size, id);
    for (std::size_t i = 0; i < frame.size(); ++i) {
      ASSERT_EQ(*reader.read(*pair.server), State::kWouldBlock);
      EXPECT_EQ(reader.mid_frame(), i > 0);
      write_all(*pair.client, ByteSpan(frame).subspan(i, 1));
    }
    ASSERT_EQ(*reader.read(*pair.server), State::kFrame);
    expect_frame(reader.frame(), size, id++);
  }
}

TEST_P(FrameIo, ManyFramesInOneRead) {
  StreamPair pair = stream_pair(GetParam(), 1 << 20);
  FrameReader reader;
  Bytes all;
  constexpr std::size_t kSizes[] = {3, 0, 70, 5000, 64, 1, 20000};
  for (std::uint64_t id = 0; id < std::size(kSizes); ++id)
    std::ranges::copy(frame_of_size(kSizes[id], id), std::back_inserter(all));
  write_all(*pair.client, all);
  for (std::uint64_t id = 0; id < std::size(kSizes); ++id) {
    ASSERT_EQ(*reader.read(*pair.server), State::kFrame);
    expect_frame(reader.frame(), kSizes[id], id);
  }
  EXPECT_EQ(*reader.read(*pair.server), State::kWouldBlock);
}

TEST_P(FrameIo, SlowReaderGetsAllAndBoundsTheQueue) {
  StreamPair pair = stream_pair(GetParam(), 16 << 10);
  FrameWriter writer(1 << 20);
  constexpr std::size_t kSize = 100'000;
  std::uint64_t sent = 0;
  while (true) {
    Bytes frame = frame_of_size(kSize, sent);
    const Status status = writer.send(*pair.client, ByteSpan(frame).first(50), ByteSpan(frame).subspan(50));
    std::ranges::fill(frame, std::byte{0xee});  // only borrowed during the call
    if (!status) {
      EXPECT_EQ(status.error().action, ErrorAction::kRetryLater);
      break;
    }
    ++sent;
    ASSERT_LT(sent, 100u);
  }
  EXPECT_GT(sent, 5u);
  EXPECT_LE(writer.queued_bytes(), 1u << 20);
  EXPECT_NE(pair.client->wants() & POLLOUT, 0);
  EXPECT_FALSE(writer.idle(*pair.client));

  FrameReader reader;
  std::uint64_t got = 0;
  for (int turn = 0; got < sent && turn < 100'000; ++turn) {
    const State state = *reader.read(*pair.server);
    if (state == State::kFrame) expect_frame(reader.frame(), kSize, got++);
    ASSERT_TRUE(writer.flush(*pair.client));
  }
  EXPECT_EQ(got, sent);
  EXPECT_TRUE(*writer.flush(*pair.client));
  EXPECT_TRUE(writer.idle(*pair.client));
  EXPECT_EQ(writer.queued_bytes(), 0u);
}

TEST_P(FrameIo, SharedRowsAreNotCopiedAndAreReleased) {
  StreamPair pair = stream_pair(GetParam(), 16 << 10);
  FrameWriter writer;
  FrameReader reader;
  constexpr std::size_t kSize = 3'000'000;
  auto frame = std::make_shared<Bytes>(frame_of_size(kSize, 5));
  std::weak_ptr<Bytes> watch = frame;
  const ByteSpan bytes(*frame);
  ASSERT_TRUE(writer.send_shared(*pair.client, bytes.first(24), bytes.subspan(24), std::move(frame)));
  EXPECT_FALSE(watch.expired());
  State state = State::kWouldBlock;
  for (int turn = 0; state != State::kFrame && turn < 100'000; ++turn) {
    state = *reader.read(*pair.server);
    ASSERT_TRUE(writer.flush(*pair.client));
  }
  ASSERT_EQ(state, State::kFrame);
  expect_frame(reader.frame(), kSize, 5);
  EXPECT_TRUE(watch.expired());
  EXPECT_GE(reader.buffer_bytes(), kSize);
  reader.shrink();
  EXPECT_LT(reader.buffer_bytes(), kSize);
}

TEST_P(FrameIo, CloseBetweenFramesIsAnEnd) {
  StreamPair pair = stream_pair(GetParam());
  FrameReader reader;
  write_all(*pair.client, frame_of_size(10, 1));
  pair.client->shutdown();
  EXPECT_EQ(*reader.read(*pair.server), State::kFrame);
  EXPECT_EQ(*reader.read(*pair.server), State::kEnd);
}

TEST_P(FrameIo, CloseInMidFrameIsAnError) {
  for (std::size_t cut : {1, 23, 24, 500}) {
    StreamPair pair = stream_pair(GetParam());
    FrameReader reader;
    write_all(*pair.client, ByteSpan(frame_of_size(1000, 1)).first(cut));
    EXPECT_EQ(*reader.read(*pair.server), State::kWouldBlock);
    pair.client->shutdown();
    const auto outcome = reader.read(*pair.server);
    ASSERT_FALSE(outcome);
    EXPECT_NE(outcome.error().message.find("middle of a frame"), std::string::npos);
  }
}

TEST_P(FrameIo, VanishedPeerIsAnEndOrAnError) {
  StreamPair pair = stream_pair(GetParam());
  FrameReader reader;
  pair.client.reset();  // no goodbye, as after SIGKILL
  const auto outcome = reader.read(*pair.server);
  if (GetParam() == Kind::kPlain) {
    EXPECT_EQ(*outcome, State::kEnd);
  } else {
    EXPECT_FALSE(outcome);
  }
  FrameWriter writer;
  EXPECT_FALSE(writer.send(*pair.server, frame_of_size(10, 1)));
}

TEST_P(FrameIo, DamageIsFound) {
  StreamPair pair = stream_pair(GetParam());
  FrameReader reader;
  Bytes frame = frame_of_size(1000, 1);
  frame[700] ^= std::byte{4};
  write_all(*pair.client, frame);
  const auto outcome = reader.read(*pair.server);
  ASSERT_FALSE(outcome);
  EXPECT_NE(outcome.error().message.find("checksum"), std::string::npos);
}

TEST_P(FrameIo, LengthsOverTheLimitAreRefusedUnread) {
  StreamPair pair = stream_pair(GetParam());
  FrameReader reader(wire::payload_bytes_max(wire::FrameType::kHello));
  std::array<std::byte, wire::kHeaderBytes> header;
  wire::encode_header({.type = wire::FrameType::kExec, .payload_bytes = 1 << 20}, header);
  write_all(*pair.client, header);
  EXPECT_FALSE(reader.read(*pair.server));
}

TEST_P(FrameIo, AHeaderAloneAllocatesNothingBig) {
  StreamPair pair = stream_pair(GetParam());
  FrameReader reader;
  std::array<std::byte, wire::kHeaderBytes> header;
  wire::encode_header({.type = wire::FrameType::kExec, .payload_bytes = wire::kFramePayloadBytesMax}, header);
  write_all(*pair.client, header);
  write_all(*pair.client, pattern(100));
  EXPECT_EQ(*reader.read(*pair.server), State::kWouldBlock);
  EXPECT_LE(reader.buffer_bytes(), 128u << 10);
}

TEST_P(FrameIo, BytesReadElsewhereAreFed) {
  StreamPair pair = stream_pair(GetParam());
  FrameReader reader;
  write_all(*pair.client, frame_of_size(100, 3));
  std::array<std::byte, 4> first;
  ASSERT_EQ((*pair.server->read_some(first)).bytes, 4u);
  reader.feed(first);
  EXPECT_TRUE(reader.mid_frame());
  ASSERT_EQ(*reader.read(*pair.server), State::kFrame);
  expect_frame(reader.frame(), 100, 3);
}

TEST_P(FrameIo, WaitReady) {
  StreamPair pair = stream_pair(GetParam());
  FrameReader reader;
  EXPECT_EQ(*reader.read(*pair.server), State::kWouldBlock);
  EXPECT_FALSE(*wait_ready(*pair.server, 0));
  write_all(*pair.client, frame_of_size(50'000, 1));
  EXPECT_TRUE(*wait_ready(*pair.server, 1000));
  // Part of a record read: poll sees nothing, the stream knows better.
  std::array<std::byte, 10> some;
  ASSERT_EQ((*pair.server->read_some(some)).bytes, 10u);
  EXPECT_TRUE(*wait_ready(*pair.server, 0));
}

}  // namespace
}  // namespace kvasir::net
