#include "dispatch/client/upload.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>

namespace kvasir::dispatch {
namespace {

// "worker:experts …", by worker.
std::string shared(std::uint32_t n_missing, const std::vector<UploadOffer>& offers, std::uint32_t first = 0) {
  std::vector<std::uint32_t> missing(n_missing);
  std::iota(missing.begin(), missing.end(), first);
  std::vector<UploadShare> shares = share_out(missing, offers);
  std::ranges::sort(shares, {}, &UploadShare::worker);
  std::string text;
  for (const UploadShare& share : shares) text += std::to_string(share.worker) + "=" + format_ranges(share.experts) + " ";
  return text;
}

TEST(ShareOut, InProportionToTheRoom) {
  EXPECT_EQ(shared(30, {{0, 100}, {1, 100}, {2, 100}}), "0=0:10 1=10:20 2=20:30 ");
  EXPECT_EQ(shared(12, {{0, 4}, {1, 8}}), "0=8:12 1=0:8 ");
  EXPECT_EQ(shared(6, {{0, 3}, {1, 6}}, 2), "0=6:8 1=2:6 ");
}

TEST(ShareOut, FewExpertsGoToThoseWithMostRoom) {
  EXPECT_EQ(shared(2, {{0, 50}, {1, 70}, {2, 60}}), "1=0 2=1 ");
  EXPECT_EQ(shared(1, {{0, 0}, {1, 1}}), "1=0 ");
}

TEST(ShareOut, RoomIsABound) {
  EXPECT_EQ(shared(10, {{0, 1}, {1, 2}}), "0=2 1=0:2 ");  // the rest is nobody's
  EXPECT_EQ(shared(10, {}), "");
  EXPECT_EQ(shared(10, {{0, 0}}), "");
  EXPECT_EQ(shared(0, {{0, 5}}), "");
  EXPECT_EQ(shared(7, {{0, UINT64_MAX}, {1, UINT64_MAX}}), "0=0:4 1=4:7 ");
}

}  // namespace
}  // namespace kvasir::dispatch
