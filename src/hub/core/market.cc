#include "hub/core/market.h"

#include <algorithm>
#include <array>
#include <format>

#include "base/check.h"
#include "base/hex.h"
#include "hub/core/market_state.h"

namespace kvasir::hub {
namespace {

// A node that was told to move and still holds the same after this long is left where it is.
constexpr Nanos kMoveGrace = std::chrono::minutes(15);
// After that many failed or ignored challenges in a row a node is not asked again for a while.
constexpr std::uint32_t kProofFailuresMax = 3;
constexpr Nanos kProofBar = std::chrono::minutes(30);
// However diligently a node renews it.
constexpr Nanos kReservationAgeMax = std::chrono::hours(1);
constexpr Nanos kWatchInterval = std::chrono::seconds(1);

Status check_inside(const ModelShape& shape, const Segments& segments) {
  if (segments.size() > kSegmentsMax)
    return fix_input(std::format("{} ranges are too many; a node may hold {} at most.", segments.size(), kSegmentsMax));
  for (const Segment& s : segments) {
    if (s.layer >= shape.n_expert.size())
      return fix_input(
          std::format("layer {} does not exist; '{}' has layers 0:{}.", s.layer, shape.name, shape.n_expert.size()));
    if (s.end > shape.n_expert[s.layer])
      return fix_input(std::format("expert {} of layer {} does not exist; that layer of '{}' has experts 0:{}.",
                                   s.end - 1, s.layer, shape.name, shape.n_expert[s.layer]));
  }
  return {};
}

}  // namespace

std::uint32_t ModelShape::n_expert_max() const { return n_expert.empty() ? 0 : std::ranges::max(n_expert); }

Market::Market(MarketOptions options, std::function<std::uint64_t()> entropy)
    : options_(options), entropy_(std::move(entropy)) {}
Market::Market(Market&&) noexcept = default;
Market::~Market() = default;

std::string Market::random_id() {
  const std::array<std::uint64_t, 2> bits = {entropy_(), entropy_()};
  return to_hex(std::as_bytes(std::span(bits)));
}

// --- models ---------------------------------------------------------------------------

Status Market::put_model(ModelShape shape) {
  KVASIR_CHECK(shape.n_expert.size() == shape.bytes_per_expert.size() &&
               shape.n_expert.size() == shape.proof_bytes.size());
  remove_model(shape.name);
  if (models_.size() >= kModelsMax)
    return retry_later(std::format("the hub has {} models, which is its limit.", kModelsMax));
  const std::string name = shape.name;
  models_.emplace(name, std::make_unique<Model>(std::move(shape), options_.target));
  return {};
}

void Market::remove_model(std::string_view name) {
  const auto found = models_.find(name);
  if (found == models_.end()) return;
  Model* const gone = found->second.get();
  std::erase_if(nodes_, [&](auto& entry) {
    if (entry.second->model != gone) return false;
    forget(*entry.second);
    return true;
  });
  std::vector<std::string> promised;
  for (const auto& [id, reservation] : reservations_)
    if (reservation->model == gone) promised.push_back(id);
  for (const std::string& id : promised) release(id);
  models_.erase(found);
  ++routes_version_;
}

Market::Model* Market::model(std::string_view name) {
  const auto found = models_.find(name);
  return found == models_.end() ? nullptr : found->second.get();
}

const ModelShape* Market::find_model(std::string_view name) const {
  const auto found = models_.find(name);
  return found == models_.end() ? nullptr : &found->second->shape;
}

std::vector<const ModelShape*> Market::models() const {
  std::vector<const ModelShape*> out;
  for (const auto& [name, model] : models_) out.push_back(&model->shape);
  return out;
}

// --- nodes ----------------------------------------------------------------------------

Result<CoverageReply> Market::coverage(Coverage beat, TimePoint now) {
  advance(now);
  Model* const claimed_model = model(beat.model);
  if (claimed_model == nullptr) return fix_input(std::format("there is no model '{}' here.", beat.model));
  KVASIR_TRY(check_inside(claimed_model->shape, beat.holdings));

  auto found = nodes_.find(beat.worker_id);
  if (found == nodes_.end()) {
    if (nodes_.size() >= kNodesMax)
      return retry_later(std::format("the hub keeps {} nodes, which is its limit.", kNodesMax));
    auto fresh = std::make_unique<Node>();
    fresh->worker_id = beat.worker_id;
    fresh->owner = beat.owner;
    fresh->model = claimed_model;
    fresh->joined = now;
    fresh->age = by_age_.insert(by_age_.end(), fresh.get());
    found = nodes_.emplace(beat.worker_id, std::move(fresh)).first;
  }
  Node& node = *found->second;
  if (node.owner != beat.owner)
    return fix_input(std::format("worker id '{}' belongs to another token; choose another id.", beat.worker_id));
  node.seen = now;
  node.line_ended.reset();
  if (node.lost) {
    node.lost = false;
    enter_grid(node);
  }
  by_age_.splice(by_age_.end(), by_age_, node.age);

  if (node.model != claimed_model) {
    set_counted(node, {});
    node.claimed.clear();
    node.open.reset();
    node.model = claimed_model;
  }
  if (node.url != beat.url || node.fingerprint != beat.fingerprint || node.ticket != beat.ticket ||
      node.draining != beat.draining) {
    leave_grid(node);
    node.url = std::move(beat.url);
    node.fingerprint = std::move(beat.fingerprint);
    node.ticket = std::move(beat.ticket);
    node.draining = beat.draining;
    enter_grid(node);
    ++routes_version_;
  }
  node.capacity_bytes = beat.capacity_bytes;
  node.device = std::move(beat.device);
  if (node.speed != beat.speed_rows_per_s) {
    speeds_.remove(node.speed);
    node.speed = beat.speed_rows_per_s;
    speeds_.add(node.speed);
  }
  if (node.claimed != beat.holdings) {
    node.claimed = std::move(beat.holdings);
    if (node.moving_since) {  // it has moved, or is on its way
      node.moving_since.reset();
      experts_moving_ -= count_experts(node.counted);
      enter_grid(node);
    }
    set_counted(node, options_.proof ? intersect(node.counted, node.claimed) : node.claimed);
  } else if (node.moving_since && now - *node.moving_since > kMoveGrace) {
    node.moving_since.reset();
    experts_moving_ -= count_experts(node.counted);
    enter_grid(node);
  }
  if (options_.proof) prove(node, now);
  weigh(node);

  if (Reservation* const held = find_reservation(beat.reservation, node.worker_id, node.owner)) {
    if (held->model == node.model && is_subset(held->segments, node.counted)) {
      release(held->id);
    } else if (!beat.reservation.empty()) {
      by_expiry_.erase({held->expires, held});
      held->expires = std::min(std::max(held->expires, now + options_.ttl), held->created + kReservationAgeMax);
      by_expiry_.insert({held->expires, held});
    }
  }

  CoverageReply reply;
  reply.move = should_move(node, now);
  reply.experts_counted = count_experts(node.counted);
  if (node.open) reply.challenge = node.open->challenge;
  return reply;
}

void Market::enter_grid(Node& node) {
  if (node.in_grid || node.draining || node.lost || node.moving_since || node.counted.empty()) return;
  node.model->grid.add_held(node.counted, node.weight);
  node.in_grid = true;
}

void Market::leave_grid(Node& node) {
  if (!node.in_grid) return;
  node.model->grid.remove_held(node.counted, node.weight);
  node.in_grid = false;
}

void Market::set_counted(Node& node, Segments counted) {
  if (node.counted == counted) return;
  if (node.moving_since) experts_moving_ = experts_moving_ - count_experts(node.counted) + count_experts(counted);
  leave_grid(node);
  node.counted = std::move(counted);
  enter_grid(node);
  ++routes_version_;
}

void Market::weigh(Node& node) {
  const std::uint32_t weight = speeds_.weigh(node.speed, node.weight);
  if (weight == node.weight) return;
  const bool was_in = node.in_grid;
  leave_grid(node);
  node.weight = weight;
  if (was_in) enter_grid(node);
}

void Market::forget(Node& node) {
  leave_grid(node);
  if (node.moving_since) experts_moving_ -= count_experts(node.counted);
  speeds_.remove(node.speed);
  by_age_.erase(node.age);
  ++routes_version_;
}

bool Market::remove_node(std::string_view worker_id, TimePoint now) {
  advance(now);
  const auto found = nodes_.find(worker_id);
  if (found == nodes_.end()) return false;
  forget(*found->second);
  nodes_.erase(found);
  return true;
}

void Market::expire_nodes(TimePoint now) {
  while (!by_age_.empty() && now - by_age_.front()->seen > options_.ttl) {
    const auto found = nodes_.find(by_age_.front()->worker_id);
    KVASIR_CHECK(found != nodes_.end());
    forget(*found->second);
    nodes_.erase(found);
  }
}

void Market::line_ended(std::string_view worker_id, TimePoint now) {
  const auto found = nodes_.find(worker_id);
  // Beyond the limit the node is missed when its heartbeats stay away.
  if (found == nodes_.end() || ended_lines_.size() >= kEndedLinesMax) return;
  found->second->line_ended = now;
  ended_lines_.emplace_back(now, worker_id);
}

void Market::line_opened(std::string_view worker_id) {
  if (const auto found = nodes_.find(worker_id); found != nodes_.end()) found->second->line_ended.reset();
}

std::string Market::find_owner(std::string_view worker_id) const {
  const auto found = nodes_.find(worker_id);
  return found == nodes_.end() ? std::string() : found->second->owner;
}

void Market::lose_silent_nodes(TimePoint now) {
  while (!ended_lines_.empty() && now - ended_lines_.front().first >= kLineGrace) {
    const auto [ended, id] = std::move(ended_lines_.front());
    ended_lines_.pop_front();
    const auto found = nodes_.find(id);
    if (found == nodes_.end() || found->second->line_ended != ended) continue;
    leave_grid(*found->second);
    found->second->lost = true;
  }
}

void Market::for_each_node(TimePoint now, const std::function<void(const NodeView&)>& visit) const {
  for (const auto& [id, node] : nodes_)
    visit({node->worker_id, node->owner, node->model->shape.name, node->url, node->fingerprint, node->ticket,
           node->counted, node->speed, node->capacity_bytes, count_experts(node->claimed), node->device, node->draining,
           node->moving_since.has_value(), node->lost, now - node->seen});
}

// --- proofs ---------------------------------------------------------------------------

void Market::prove(Node& node, TimePoint now) {
  if (node.open && now > node.open->expires) {
    const std::string id = node.open->challenge.id;
    settle_proof(node.worker_id, id, false, now);
  }
  if (node.open && !is_subset(node.open->claims, node.claimed)) node.open.reset();  // it asks for what is gone
  if (node.open || node.claimed.empty() || now < node.barred_until) return;
  const bool complete = node.counted == node.claimed;
  if (complete && now < node.next_recheck) return;
  node.open =
      Node::OpenChallenge{make_challenge(*node.model, complete ? node.claimed : subtract(node.claimed, node.counted)),
                          node.claimed, now + options_.challenge_ttl};
}

Challenge Market::make_challenge(const Model& model, const Segments& claims) {
  Challenge challenge;
  challenge.id = random_id();
  const std::uint64_t n = count_experts(claims);
  for (std::uint32_t i = 0; i < kProofSpans; ++i) {
    const Cell cell = nth_expert(claims, entropy_() % n);
    const std::uint64_t bytes = model.shape.proof_bytes[cell.layer];
    ProofSpan span{cell.layer, cell.expert, 0, std::min(bytes, kProofSpanBytesMax)};
    if (bytes > span.length) span.offset = entropy_() % (bytes - span.length + 1);
    challenge.spans.push_back(span);
  }
  return challenge;
}

std::optional<Challenge> Market::open_challenge(std::string_view worker_id, std::string_view owner,
                                                std::string_view id) const {
  const auto found = nodes_.find(worker_id);
  if (found == nodes_.end() || found->second->owner != owner) return std::nullopt;
  const auto& open = found->second->open;
  if (!open || open->challenge.id != id) return std::nullopt;
  return open->challenge;
}

void Market::settle_proof(std::string_view worker_id, std::string_view id, bool passed, TimePoint now) {
  const auto found = nodes_.find(worker_id);
  if (found == nodes_.end()) return;
  Node& node = *found->second;
  if (!node.open || node.open->challenge.id != id) return;
  const Segments claims = std::move(node.open->claims);
  node.open.reset();
  if (passed && now <= node.seen + options_.ttl) {
    node.failures = 0;
    // Not all at the same moment.
    node.next_recheck =
        now + options_.recheck_interval + Nanos(static_cast<std::int64_t>(entropy_() % 60) * 1'000'000'000);
    set_counted(node, intersect(claims, node.claimed));
    return;
  }
  set_counted(node, {});
  if (++node.failures >= kProofFailuresMax) {
    node.failures = 0;
    node.barred_until = now + kProofBar;
  }
}

// --- moving ---------------------------------------------------------------------------

void Market::watch_scarcity(Model& model, TimePoint now) {
  if (model.grid.peak() <= 0) {
    model.scarce_since.reset();
  } else if (!model.scarce_since) {
    model.scarce_since = now;
  }
}

bool Market::should_move(Node& node, TimePoint now) {
  if (node.moving_since) return true;  // again, in case the answer was lost
  if (!node.in_grid || now - node.joined < options_.move_after) return false;
  if (node.last_moved && now - *node.last_moved < options_.move_interval) return false;
  std::uint64_t missing = 0;
  for (const auto& [name, model] : models_)
    if (model->scarce_since && now - *model->scarce_since >= options_.move_after) missing += model->grid.deficit();
  if (missing == 0) return false;
  // No more of them on the way than there is room for.
  const std::uint64_t size = count_experts(node.counted);
  if (experts_moving_ > 0 && (experts_moving_ + size) * kWeightUnit > missing) return false;
  if (!node.model->grid.is_surplus(node.counted, node.weight)) return false;
  leave_grid(node);
  node.moving_since = node.last_moved = now;
  experts_moving_ += size;
  return true;
}

// --- time -----------------------------------------------------------------------------

void Market::advance(TimePoint now) {
  expire_nodes(now);
  expire_reservations(now);
  lose_silent_nodes(now);
  if (watched_ && now - *watched_ < kWatchInterval) return;
  watched_ = now;
  for (auto& [name, model] : models_) {
    model->targets.update(now, model->grid);
    watch_scarcity(*model, now);
  }
}

void Market::report_heat(std::string_view name, std::uint32_t layer, std::span<const std::uint64_t> uses) {
  if (Model* const found = model(name)) found->targets.report_heat(layer, uses);
}

void Market::report_saturation(std::string_view name, double share) {
  if (Model* const found = model(name)) found->targets.report_saturation(share);
}

}  // namespace kvasir::hub
