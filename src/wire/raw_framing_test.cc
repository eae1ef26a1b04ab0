#include "wire/raw_framing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "wire/codec.h"

namespace kvasir::wire {
namespace {

constexpr std::uint32_t kEmbd = 4;
constexpr std::uint32_t kHeld = 16;

Bytes head(std::int32_t n_used, std::int32_t n_tokens) {
  Bytes bytes;
  ByteWriter out(bytes);
  out.put(n_used);
  out.put(n_tokens);
  return bytes;
}

Bytes request(std::int32_t n_used, std::int32_t n_tokens, std::uint32_t n_embd = kEmbd) {
  Bytes bytes = head(n_used, n_tokens);
  ByteWriter out(bytes);
  for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(n_tokens) * n_embd; ++i)
    out.put(static_cast<float>(i) + 0.5f);
  for (std::int32_t t = 0; t < n_tokens; ++t)
    for (std::int32_t u = 0; u < n_used; ++u) out.put(static_cast<std::int32_t>((t + u) % kHeld));
  return bytes;
}

TEST(RawFraming, ToldApartByTheFirstFourBytes) {
  const Bytes raw = request(8, 1);
  EXPECT_EQ(detect_framing(raw), Framing::kRaw);
  EXPECT_EQ(detect_framing(ByteSpan(raw).first(3)), std::nullopt);
  EXPECT_EQ(detect_framing(encode_empty_frame(FrameType::kDrain, 0)), Framing::kKvasir);
}

TEST(RawFraming, AnyCutGivesTheSameRequests) {
  Bytes all = request(2, 3);
  std::ranges::copy(request(1, 1), std::back_inserter(all));
  std::ranges::copy(request(16, 2), std::back_inserter(all));
  for (std::size_t step : {1, 3, 8, 50, 10000}) {
    RawParser parser(kEmbd, kHeld);
    std::vector<std::pair<std::uint32_t, std::uint32_t>> shapes;
    for (std::size_t at = 0; at < all.size();) {
      auto taken = parser.feed(ByteSpan(all).subspan(at, std::min(step, all.size() - at)));
      ASSERT_TRUE(taken) << taken.error().message;
      ASSERT_GT(*taken, 0u);
      at += *taken;
      if (!parser.complete()) {
        EXPECT_TRUE(parser.mid_request());
        continue;
      }
      const RawRequest& got = parser.request();
      shapes.emplace_back(got.n_used, got.n_tokens);
      ASSERT_EQ(got.cur.size(), got.n_tokens * kEmbd);
      ASSERT_EQ(got.sel.size(), got.answer_rows());
      for (std::size_t i = 0; i < got.cur.size(); ++i) EXPECT_EQ(got.cur[i], static_cast<float>(i) + 0.5f);
      for (std::size_t i = 0; i < got.sel.size(); ++i)
        EXPECT_EQ(got.sel[i], static_cast<std::int32_t>((i / got.n_used + i % got.n_used) % kHeld));
      EXPECT_FALSE(parser.mid_request());
    }
    EXPECT_EQ(shapes, (std::vector<std::pair<std::uint32_t, std::uint32_t>>{{2, 3}, {1, 1}, {16, 2}})) << step;
  }
}

TEST(RawFraming, BadHeadsAreRefusedAtTheEighthByte) {
  const std::pair<std::int32_t, std::int32_t> kBad[] = {{0, 1},
                                                        {-1, 1},
                                                        {1, 0},
                                                        {1, -1},
                                                        {17, 1},
                                                        {1025, 1},
                                                        {1, 16385},
                                                        {INT32_MAX, INT32_MAX},
                                                        {INT32_MIN, INT32_MIN},
                                                        {0x5253564b, 1}};
  for (const auto& [n_used, n_tokens] : kBad) {
    RawParser parser(kEmbd, kHeld);
    const Bytes bytes = head(n_used, n_tokens);
    EXPECT_TRUE(parser.feed(ByteSpan(bytes).first(7)));
    EXPECT_FALSE(parser.feed(ByteSpan(bytes).last(1))) << n_used << ' ' << n_tokens;
  }
  RawParser wide(kWidthMax, kHeld);
  EXPECT_FALSE(wide.feed(head(1, 17)));   // 68 MiB of rows
  RawParser deep(kWidthMax, 1024);
  EXPECT_FALSE(deep.feed(head(1024, 1)));  // a 4 MiB request for a 4 GiB answer
}

TEST(RawFraming, BadSelectionsAreRefused) {
  for (const std::int32_t bad : {-1, 16, 7 /* twice */, INT32_MAX, INT32_MIN}) {
    Bytes bytes = request(8, 2);
    store_le(bytes.data() + bytes.size() - 8, bad);
    store_le(bytes.data() + bytes.size() - 4, std::int32_t{7});
    RawParser parser(kEmbd, kHeld);
    EXPECT_FALSE(parser.feed(bytes)) << bad;
  }
}

}  // namespace
}  // namespace kvasir::wire
