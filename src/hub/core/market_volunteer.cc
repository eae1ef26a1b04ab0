// Demand, and what a volunteer gets.

#include <algorithm>
#include <format>
#include <iterator>

#include "base/check.h"
#include "hub/core/market_state.h"

namespace kvasir::hub {
namespace {

constexpr std::uint64_t kTransferSecondsMax = 24 * 3600;  // keeps the arithmetic small

Segments to_segments(const std::vector<Run>& runs) {
  std::vector<Segment> segments;
  segments.reserve(runs.size());
  for (const Run& run : runs) segments.push_back({run.layer, run.begin, run.end});
  return normalize(std::move(segments));
}

// An owner's node: ids are only unique within a token until the node has been seen.
std::string worker_key(std::string_view owner, std::string_view worker_id) {
  return std::format("{}\n{}", owner, worker_id);
}

// Grows the first run by up to `wanted` experts on either side, not into the other runs.
void widen(std::vector<Run>& runs, std::uint32_t n_expert, std::uint64_t wanted) {
  Run& first = runs.front();
  std::uint32_t low = 0, high = n_expert;
  for (const Run& other : std::span(runs).subspan(1)) {
    if (other.layer != first.layer) continue;
    if (other.end <= first.begin) low = std::max(low, other.end);
    if (other.begin >= first.end) high = std::min(high, other.begin);
  }
  const auto up = static_cast<std::uint32_t>(std::min<std::uint64_t>(wanted, high - first.end));
  first.end += up;
  first.begin -= static_cast<std::uint32_t>(std::min<std::uint64_t>(wanted - up, first.begin - low));
}

}  // namespace

std::vector<Run> Market::demand(std::string_view name, TimePoint now) {
  advance(now);
  const Model* const found = model(name);
  KVASIR_CHECK(found != nullptr);
  std::vector<Run> out;
  for (std::uint32_t layer = 0; layer < found->grid.n_layer(); ++layer)
    std::ranges::copy(found->grid.runs(layer), std::back_inserter(out));
  return out;
}

Result<std::uint64_t> Market::smallest_useful(const Model& model, const Offer& offer) const {
  const std::uint64_t experts = std::min(options_.experts_min, model.shape.n_expert_max());
  std::uint64_t expert_bytes = UINT64_MAX;
  for (std::size_t i = 0; i < model.shape.n_expert.size(); ++i)
    if (model.shape.n_expert[i] > 0) expert_bytes = std::min(expert_bytes, model.shape.bytes_per_expert[i]);
  if (offer.experts_max && *offer.experts_max < experts)
    return fix_input(
        std::format("{} experts are too few to be of use; offer {} or more.", *offer.experts_max, experts));
  if (offer.bytes_max && *offer.bytes_max / experts < expert_bytes)
    return fix_input(
        std::format("{} bytes are too few for a slice of '{}', whose experts take {} bytes each; offer {} or more.",
                    *offer.bytes_max, model.shape.name, expert_bytes, experts * expert_bytes));
  return experts;
}

Result<std::optional<Assignment>> Market::volunteer(const Offer& offer, TimePoint now) {
  advance(now);
  if (!offer.experts_max && !offer.bytes_max) return fix_input("say what you offer: max_experts or memory_bytes.");
  // A node that asks again has given its former place up.
  if (const Reservation* const former = find_reservation({}, offer.worker_id, offer.owner))
    release(std::string(former->id));
  std::vector<Model*> candidates;
  if (!offer.model.empty()) {
    Model* const named = model(offer.model);
    if (named == nullptr) return fix_input(std::format("there is no model '{}' here.", offer.model));
    candidates.push_back(named);
  } else {
    for (const auto& [name, each] : models_)
      if (each->grid.peak() > 0) candidates.push_back(each.get());
    std::ranges::stable_sort(candidates, [](const Model* a, const Model* b) {
      return std::pair(a->grid.peak(), a->grid.deficit()) > std::pair(b->grid.peak(), b->grid.deficit());
    });
  }
  std::optional<Error> too_small;
  for (Model* const candidate : candidates) {
    if (candidate->shape.n_expert_max() == 0) continue;
    if (const auto useful = smallest_useful(*candidate, offer); !useful) {
      too_small = useful.error();
      continue;
    }
    std::vector<Run> runs = choose(*candidate, offer);
    if (runs.empty()) continue;
    if (reservations_.size() >= kReservationsMax)
      return retry_later(
          std::format("the hub keeps {} reservations, which is its limit; ask again later.", kReservationsMax));
    Assignment assignment;
    assignment.model = &candidate->shape;
    assignment.reservation = reserve(*candidate, offer, runs, now, assignment.expires_in);
    assignment.runs = std::move(runs);
    return assignment;
  }
  if (too_small) return std::unexpected(*too_small);
  return std::nullopt;
}

std::vector<Run> Market::choose(Model& model, const Offer& offer) {
  const CoverageGrid& grid = model.grid;
  std::uint32_t first_layer = 0;
  for (std::uint32_t layer = 1; layer < grid.n_layer(); ++layer)
    if (grid.peak(layer) > grid.peak(first_layer)) first_layer = layer;
  if (grid.n_layer() == 0 || grid.peak(first_layer) <= 0) return {};

  struct Candidate {
    double scarcity;
    const Run* run;
  };
  std::vector<Candidate> heap;
  for (std::uint32_t layer = 0; layer < grid.n_layer(); ++layer) {
    if (grid.peak(layer) <= 0) continue;
    for (const Run& run : grid.runs(layer))
      if (const double s = run.scarcity(); s > 0) heap.push_back({s, &run});
  }
  // Scarcest first; then the layer of the first, for a node is asked once per layer and token.
  const auto later = [first_layer](const Candidate& a, const Candidate& b) {
    if (a.scarcity != b.scarcity) return a.scarcity < b.scarcity;
    if ((a.run->layer == first_layer) != (b.run->layer == first_layer)) return b.run->layer == first_layer;
    return std::pair(a.run->layer, a.run->begin) > std::pair(b.run->layer, b.run->begin);
  };
  std::ranges::make_heap(heap, later);

  std::uint64_t experts_left = offer.experts_max.value_or(UINT64_MAX);
  std::uint64_t bytes_left = offer.bytes_max.value_or(UINT64_MAX);
  const auto fitting = [&](std::uint32_t layer) {
    return std::min(experts_left, bytes_left / model.shape.bytes_per_expert[layer]);
  };
  std::vector<Run> chosen;
  std::uint64_t total = 0;
  while (!heap.empty() && chosen.size() < kAssignmentsMax && experts_left > 0) {
    std::ranges::pop_heap(heap, later);
    Run run = *heap.back().run;
    heap.pop_back();
    const std::uint64_t n = std::min<std::uint64_t>(run.size(), fitting(run.layer));
    // A remainder too small to be of use, unless the hole itself is as small.
    if (n < std::min<std::uint64_t>(run.size(), options_.experts_min)) continue;
    run.end = run.begin + static_cast<std::uint32_t>(n);
    experts_left -= n;
    bytes_left -= n * model.shape.bytes_per_expert[run.layer];
    total += n;
    chosen.push_back(run);
  }
  if (!chosen.empty() && total < options_.experts_min)
    widen(chosen, grid.n_expert(chosen.front().layer),
          std::min(options_.experts_min - total, fitting(chosen.front().layer)));
  return chosen;
}

std::string Market::reserve(Model& model, const Offer& offer, const std::vector<Run>& runs, TimePoint now,
                            Nanos& lasts) {
  auto reservation = std::make_unique<Reservation>();
  reservation->id = random_id();
  reservation->owner = offer.owner;
  reservation->worker_id = offer.worker_id;
  reservation->model = &model;
  reservation->segments = to_segments(runs);
  std::uint64_t bytes = 0;
  for (const Segment& s : reservation->segments)
    if (model.shape.bytes_per_expert[s.layer] != kUnknownExpertBytes)
      bytes += s.size() * model.shape.bytes_per_expert[s.layer];
  const auto transfer_s = std::min<std::uint64_t>(bytes / options_.slow_line_bytes_per_s, kTransferSecondsMax);
  lasts = std::min(options_.reservation_min + std::chrono::seconds(transfer_s), options_.reservation_max);
  reservation->created = now;
  reservation->expires = now + lasts;
  model.grid.add_reserved(reservation->segments);
  by_expiry_.insert({reservation->expires, reservation.get()});
  if (!offer.worker_id.empty()) by_worker_[worker_key(offer.owner, offer.worker_id)] = reservation.get();
  std::string id = reservation->id;
  reservations_.emplace(id, std::move(reservation));
  return id;
}

Market::Reservation* Market::find_reservation(std::string_view id, std::string_view worker_id, std::string_view owner) {
  Reservation* out = nullptr;
  if (!id.empty()) {
    const auto found = reservations_.find(id);
    if (found != reservations_.end()) out = found->second.get();
  } else if (!worker_id.empty()) {
    const auto found = by_worker_.find(worker_key(owner, worker_id));
    if (found != by_worker_.end()) out = found->second;
  }
  return out != nullptr && out->owner == owner ? out : nullptr;
}

void Market::release(const std::string& id) {
  const auto found = reservations_.find(id);
  KVASIR_CHECK(found != reservations_.end());
  const std::unique_ptr<Reservation> gone = std::move(found->second);
  reservations_.erase(found);
  gone->model->grid.remove_reserved(gone->segments);
  by_expiry_.erase({gone->expires, gone.get()});
  const auto named = by_worker_.find(worker_key(gone->owner, gone->worker_id));
  if (named != by_worker_.end() && named->second == gone.get()) by_worker_.erase(named);
}

void Market::expire_reservations(TimePoint now) {
  while (!by_expiry_.empty() && by_expiry_.begin()->first <= now) release(std::string(by_expiry_.begin()->second->id));
}

}  // namespace kvasir::hub
