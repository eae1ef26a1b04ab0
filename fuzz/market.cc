// The coverage market against a simple model of itself: any order of heartbeats, offers, goodbyes
// and time. What the market says is held must be what the model counts by hand.

#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "base/check.h"
#include "hub/core/market.h"

namespace {

using namespace kvasir;
using namespace kvasir::hub;

constexpr std::uint32_t kLayers = 3, kExperts = 16;

class Input {
 public:
  explicit Input(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}
  bool empty() const { return bytes_.empty(); }
  std::uint32_t below(std::uint32_t n) {
    if (bytes_.empty()) return 0;
    const std::uint32_t value = bytes_.front();
    bytes_ = bytes_.subspan(1);
    return value % n;
  }

 private:
  std::span<const std::uint8_t> bytes_;
};

struct Node {
  std::string owner;
  Segments holdings;
  TimePoint seen;
  bool draining = false;
};

class Model {
 public:
  explicit Model(MarketOptions options) : market_(options, [n = std::uint64_t{1}]() mutable { return n++ * 0x9e3779b97f4a7c15u; }) {
    ModelShape shape{.name = "m", .n_embd = 64, .n_expert = {}, .bytes_per_expert = {}, .proof_bytes = {}};
    shape.n_expert.assign(kLayers, kExperts);
    shape.bytes_per_expert.assign(kLayers, 1000);
    shape.proof_bytes.assign(kLayers, 1000);
    KVASIR_CHECK(market_.put_model(shape));
  }

  void step(Input& in) {
    now_ += std::chrono::milliseconds(in.below(256) * 64);
    forget_the_silent();
    switch (in.below(6)) {
      case 0:
      case 1: heartbeat(in); break;
      case 2: volunteer(in); break;
      case 3: {
        const std::string id = worker_id(in);
        KVASIR_CHECK(market_.remove_node(id, now_) == (nodes_.erase(id) == 1));
        break;
      }
      case 4: {
        std::uint64_t uses[kExperts] = {};
        for (std::uint64_t& n : uses) n = in.below(8) * 100;
        market_.report_heat("m", in.below(kLayers + 1), uses);
        break;
      }
      default: market_.report_saturation("m", in.below(5) / 4.0);
    }
    check();
  }

 private:
  static std::string worker_id(Input& in) { return "w" + std::to_string(in.below(6)); }

  void forget_the_silent() {
    std::erase_if(nodes_, [&](const auto& item) { return now_ - item.second.seen > market_.options().ttl; });
  }

  void heartbeat(Input& in) {
    Coverage beat;
    beat.worker_id = worker_id(in);
    beat.owner = "t" + std::to_string(in.below(2));
    beat.model = "m";
    beat.url = "127.0.0.1:" + std::to_string(1 + in.below(3));
    beat.draining = in.below(8) == 0;
    beat.speed_rows_per_s = in.below(3) * 1000.0;
    const std::uint32_t n = in.below(4);
    std::vector<Segment> claimed;
    bool inside = true;
    for (std::uint32_t i = 0; i < n; ++i) {
      const std::uint32_t layer = in.below(kLayers + 1), begin = in.below(kExperts), end = begin + in.below(8);
      inside &= begin == end || (layer < kLayers && end <= kExperts);
      claimed.push_back({layer, begin, end});
    }
    beat.holdings = normalize(claimed);
    const Segments holdings = beat.holdings;
    const auto known = nodes_.find(beat.worker_id);
    const bool mine = known == nodes_.end() || known->second.owner == beat.owner;
    const std::string id = beat.worker_id, owner = beat.owner;
    const bool draining = beat.draining;
    const auto reply = market_.coverage(std::move(beat), now_);
    KVASIR_CHECK(reply.has_value() == (mine && inside));
    if (!reply) return;
    nodes_[id] = {owner, holdings, now_, draining};
    if (!market_.options().proof) KVASIR_CHECK(reply->experts_counted == count_experts(holdings));
    else KVASIR_CHECK(reply->experts_counted == 0);  // nothing is ever proved here
  }

  void volunteer(Input& in) {
    Offer offer;
    offer.model = in.below(4) == 0 ? "" : "m";
    offer.owner = "t" + std::to_string(in.below(2));
    if (in.below(2) == 0) offer.worker_id = worker_id(in);
    if (in.below(4) != 0) offer.experts_max = in.below(64);
    else offer.bytes_max = in.below(200) * 500;
    const auto offered = market_.volunteer(offer, now_);
    if (!offered || !*offered) return;
    std::uint64_t experts = 0;
    KVASIR_CHECK(!(*offered)->runs.empty() && (*offered)->runs.size() <= kAssignmentsMax);
    for (const Run& run : (*offered)->runs) {
      KVASIR_CHECK(run.layer < kLayers && run.begin < run.end && run.end <= kExperts);
      experts += run.size();
    }
    if (offer.experts_max) KVASIR_CHECK(experts <= *offer.experts_max);
    if (offer.bytes_max) KVASIR_CHECK(experts * 1000 <= *offer.bytes_max);
    KVASIR_CHECK((*offered)->expires_in > Nanos(0));
  }

  void check() {
    const std::vector<Run> runs = market_.demand("m", now_);
    std::map<std::string, bool> moving;
    market_.for_each_node(now_, [&](const NodeView& node) { moving[std::string(node.worker_id)] = node.moving; });
    KVASIR_CHECK(moving.size() == nodes_.size() && market_.node_count() == nodes_.size());
    // The runs tile every layer, in order.
    std::uint32_t layer = 0, expert = 0;
    for (const Run& run : runs) {
      if (expert == kExperts) {
        ++layer;
        expert = 0;
      }
      KVASIR_CHECK(run.layer == layer && run.begin == expert && run.begin < run.end && run.end <= kExperts);
      expert = run.end;
      std::uint32_t held = 0;
      for (const auto& [id, node] : nodes_)
        held += !market_.options().proof && !node.draining && !moving.at(id) && contains(node.holdings, run.layer, run.begin);
      KVASIR_CHECK(run.held == held);
      KVASIR_CHECK(run.target >= market_.options().target && run.scarcity() >= 0 && run.scarcity() <= 1);
    }
    KVASIR_CHECK(layer == kLayers - 1 && expert == kExperts);
  }

  Market market_;
  std::map<std::string, Node> nodes_;
  TimePoint now_{std::chrono::hours(1)};
};

}  // namespace

// First byte: whether claims must be proved.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input in(std::span(data, std::min<std::size_t>(size, 4096)));
  MarketOptions options;
  options.proof = in.below(4) == 0;
  Model model(options);
  while (!in.empty()) model.step(in);
  return 0;
}
