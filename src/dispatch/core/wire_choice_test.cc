#include "dispatch/core/wire_choice.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "dispatch/core/rng.h"

namespace kvasir::dispatch {
namespace {

using wire::RowType;
using Direction = WireChoice::Direction;

void pass_gate(WireChoice& choice, std::uint32_t layer) {
  for (std::uint32_t i = 0; i < WireChoice::kGateRows; ++i)
    for (Direction direction : {Direction::kSent, Direction::kReceived}) choice.show(layer, direction, 5e-8);
}

// `n` rounds of one row at a worker whose bytes cost that share of a request in f32.
void run(WireChoice& choice, int n, double byte_share, double jitter = 0.1) {
  Rng rng(7);
  for (int i = 0; i < n; ++i) {
    const RowType type = choice.types(1, 0, 1)[0];
    const double time = type == RowType::kF16 ? 1 - byte_share / 2 : 1.0;
    choice.observe(0, type, 1, time * (1 + jitter * (2 * rng.unit() - 1)));
  }
}

int narrow_of(WireChoice& choice, int n) {
  int narrow = 0;
  for (int i = 0; i < n; ++i) narrow += choice.types(1, 0, 1)[0] == RowType::kF16;
  return narrow;
}

TEST(WireChoice, NothingTravelsNarrowBeforeTheGate) {
  WireChoice choice;
  run(choice, 500, 0.9);
  EXPECT_EQ(narrow_of(choice, 100), 0);
  for (std::uint32_t i = 0; i < WireChoice::kGateRows; ++i) choice.show(0, Direction::kSent, 5e-8);
  EXPECT_EQ(narrow_of(choice, 100), 0) << "no answer has been looked at";
}

TEST(WireChoice, ALayerThatF16DoesNotSuitStaysWide) {
  WireChoice choice;
  choice.show(0, Direction::kSent, 1e-3);
  pass_gate(choice, 0);
  pass_gate(choice, 1);
  EXPECT_FALSE(choice.gate_passed(0));
  EXPECT_FALSE(choice.gate_wants(0, Direction::kSent));
  EXPECT_TRUE(choice.gate_passed(1));
  run(choice, 500, 0.9);
  EXPECT_EQ(narrow_of(choice, 100), 0);
}

TEST(WireChoice, NarrowWhereBytesCost) {
  WireChoice choice;
  pass_gate(choice, 0);
  run(choice, 500, 0.4);
  EXPECT_GE(narrow_of(choice, 640), 620);
}

TEST(WireChoice, WideWhereTheyDoNot) {
  WireChoice choice;
  pass_gate(choice, 0);
  run(choice, 500, 0.0, 0.02);
  EXPECT_LE(narrow_of(choice, 640), 20);
}

TEST(WireChoice, ChangesItsMindWhenTheNetworkDoes) {
  WireChoice choice;
  pass_gate(choice, 0);
  run(choice, 500, 0.0, 0.02);
  run(choice, 64 * 80, 0.6, 0.02);
  EXPECT_GE(narrow_of(choice, 640), 620);
}

TEST(WireChoice, AnotherWorkerInTheSlotIsTriedAnew) {
  WireChoice choice;
  pass_gate(choice, 0);
  run(choice, 500, 0.4);
  choice.forget(0);
  const int narrow = narrow_of(choice, 40);
  EXPECT_GE(narrow, 15);
  EXPECT_LE(narrow, 25);
}

TEST(F16Loss, IsSmallForOrdinaryRowsAndOneForOverflow) {
  Rng rng(3);
  std::vector<float> row(512);
  for (float& value : row) value = static_cast<float>(rng.unit() - 0.5);
  EXPECT_LT(f16_loss(row), 1e-6);
  EXPECT_GT(f16_loss(row), 0);
  row[7] = 1e6f;
  EXPECT_EQ(f16_loss(row), 1);
  row[7] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(f16_loss(row), 1);
  for (float& value : row) value = 0;
  EXPECT_EQ(f16_loss(row), 0);
}

}  // namespace
}  // namespace kvasir::dispatch
