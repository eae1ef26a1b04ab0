#include "dispatch/core/wire_choice.h"

#include <algorithm>
#include <cmath>

#include "base/bytes.h"
#include "wire/codec.h"

namespace kvasir::dispatch {
namespace {

constexpr double kRatioMax = 4;          // one stall must not decide
constexpr std::uint32_t kMeanOver = 32;  // samples an established mean remembers

}  // namespace

void WireChoice::Mean::add(double sample) {
  count = std::min(count + 1, kMeanOver);
  value += (std::min(sample, kRatioMax) - value) / count;
}

WireChoice::Gate& WireChoice::gate(std::uint32_t layer) {
  if (gates_.size() <= layer) gates_.resize(layer + 1);
  return gates_[layer];
}

bool WireChoice::gate_wants(std::uint32_t layer, Direction direction) const {
  if (layer >= gates_.size()) return true;
  const Gate& gate = gates_[layer];
  return !gate.barred && gate.shown[static_cast<std::size_t>(direction)] < kGateRows;
}

void WireChoice::show(std::uint32_t layer, Direction direction, double loss) {
  Gate& g = gate(layer);
  ++g.shown[static_cast<std::size_t>(direction)];
  g.barred |= !(loss <= kLossMax);
}

bool WireChoice::gate_passed(std::uint32_t layer) const {
  return layer < gates_.size() && !gates_[layer].barred && !gate_wants(layer, Direction::kSent) &&
         !gate_wants(layer, Direction::kReceived);
}

WireChoice::Link& WireChoice::link(WorkerIndex w, std::uint32_t n_rows) {
  if (links_.size() <= w) links_.resize(w + 1);
  return links_[w][n_rows > kLargeRows ? 1 : 0];
}

wire::RowType WireChoice::next_type(Link& link) {
  using wire::RowType;
  ++link.asked;
  // In turn, so that both meet the same network and the same load.
  if (link.f32.count < kTrials || link.f16.count < kTrials) return link.asked % 2 == 0 ? RowType::kF32 : RowType::kF16;
  const double bytes_cost = 2 * (link.f32.value - link.f16.value) / link.f32.value;
  const bool narrow = (bytes_cost >= kByteShare) != (link.asked % kRetryEvery == 0);
  return narrow ? RowType::kF16 : RowType::kF32;
}

std::span<const wire::RowType> WireChoice::types(std::size_t n_workers, std::uint32_t layer, std::uint32_t n_rows) {
  types_.assign(n_workers, wire::RowType::kF32);
  if (gate_passed(layer))
    for (WorkerIndex w = 0; w < n_workers; ++w) types_[w] = next_type(link(w, n_rows));
  return types_;
}

void WireChoice::observe(WorkerIndex w, wire::RowType type, std::uint32_t n_rows, double ratio) {
  Link& l = link(w, n_rows);
  (type == wire::RowType::kF16 ? l.f16 : l.f32).add(ratio);
}

void WireChoice::forget(WorkerIndex w) {
  if (w < links_.size()) links_[w] = {};
}

double f16_loss(std::span<const float> row) {
  Bytes narrow(row.size() * 2);
  std::vector<float> back(row.size());
  wire::encode_row(wire::RowType::kF16, row, narrow);
  wire::decode_row(wire::RowType::kF16, narrow, back);
  double ab = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < row.size(); ++i) {
    const double a = row[i], b = back[i];
    ab += a * b;
    aa += a * a;
    bb += b * b;
  }
  if (aa == 0) return 0;
  const double cosine = ab / std::sqrt(aa * bb);
  return std::isfinite(cosine) ? std::max(0.0, 1 - cosine) : 1.0;
}

}  // namespace kvasir::dispatch
