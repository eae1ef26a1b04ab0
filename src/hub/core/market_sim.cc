// The market with many nodes that come and go, in simulated time: does it cover the model,
// how fast, and does it leave nodes in peace? Prints its figures and exits with 1 if one of
// the promises below is broken.
//
// Nodes have budgets of 8 to 64 experts and exponential lifetimes; one that leaves says
// nothing and is replaced by a new one. The target is what the whole supply covers 1.2 times.
// In the middle of the run a share of them leaves at once and comes back over five minutes.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <queue>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "hub/core/market.h"
#include "hub/core/testing.h"

namespace kvasir::hub {
namespace {

struct Options {
  std::uint32_t nodes = 100'000;
  std::uint32_t layers = 48;
  std::uint32_t experts = 256;
  double hours = 1.5;
  double lifetime_h = 4;
  double leave_at_once = 0.2;
  std::uint64_t seed = 1;
};

constexpr double kPollS = 10;
constexpr double kSupply = 1.2;
constexpr double kJoinS = 60;      // the first nodes arrive over this long
constexpr double kRejoinS = 300;   // and those after the exodus over this long
constexpr double kDownloadMinS = 2, kDownloadMaxS = 20;
constexpr double kSettleS = 300;   // after the start and the exodus, before figures count as steady

// Promises.
constexpr double kPollsToCoverMax = 3;
constexpr double kMovesPerNodeHourMax = 1;
constexpr double kVolunteerP99Ms = 5;

class Simulation {
 public:
  explicit Simulation(const Options& options)
      : options_(options), random_(options.seed), market_(market_options(), seeded(options.seed)) {
    KVASIR_CHECK(market_.put_model(uniform_model("m", options.layers, options.experts, 5'000'000)).has_value());
    hole_since_.assign(std::size_t{options.layers} * options.experts, -1);
  }

  bool run() {
    for (std::uint32_t i = 0; i < options_.nodes; ++i) add_node(uniform(0, kJoinS), budgets_[i]);
    const double end_s = options_.hours * 3600, exodus_s = end_s / 2;
    bool left = options_.leave_at_once <= 0;
    double next_look_s = 1;
    while (!events_.empty() && events_.top().time_s < end_s) {
      const Event event = events_.top();
      if (event.time_s >= next_look_s) {
        look(next_look_s);
        next_look_s += 1;
        continue;
      }
      if (!left && event.time_s >= exodus_s) {
        left = true;
        exodus(exodus_s);
        continue;
      }
      events_.pop();
      handle(event);
    }
    return report();
  }

 private:
  enum class Kind : std::uint8_t { kArrive, kPoll, kLeave };
  struct Event {
    double time_s;
    std::uint32_t node;
    Kind kind;
    bool operator<(const Event& other) const { return time_s > other.time_s; }
  };
  struct Node {
    std::string id;
    std::uint32_t budget = 0;
    Segments holdings, coming;
    std::string reservation;
    double ready_s = 0;  // of the download
    bool alive = false, counted = false;
    std::uint32_t moves = 0;
  };

  // Fills budgets_ first: the target follows from them.
  MarketOptions market_options() {
    std::uint64_t supply = 0;
    for (std::uint32_t i = 0; i < options_.nodes; ++i) {
      budgets_.push_back(8 + static_cast<std::uint32_t>(random_() % 57));
      supply += budgets_.back();
    }
    MarketOptions out = without_proof();
    const double cells = static_cast<double>(options_.layers) * options_.experts;
    out.target = std::max(1u, static_cast<std::uint32_t>(static_cast<double>(supply) / kSupply / cells));
    needed_ = static_cast<std::uint64_t>(kSupply * cells * out.target);
    return out;
  }

  double uniform(double low, double high) { return std::uniform_real_distribution<double>(low, high)(random_); }

  void add_node(double time_s, std::uint32_t budget) {
    Node node;
    node.id = "n" + std::to_string(nodes_.size());
    node.budget = budget;
    nodes_.push_back(std::move(node));
    events_.push({time_s, static_cast<std::uint32_t>(nodes_.size() - 1), Kind::kArrive});
  }

  void leave(std::uint32_t index, double time_s, double back_s) {
    Node& node = nodes_[index];
    if (!node.alive) return;
    node.alive = false;
    supply_ -= node.budget;
    if (supply_ < needed_) enough_since_s_ = -1;
    add_node(back_s, node.budget);
    (void)time_s;
  }

  void exodus(double time_s) {
    std::uint32_t wanted = static_cast<std::uint32_t>(options_.nodes * options_.leave_at_once);
    for (std::uint32_t i = 0; i < nodes_.size() && wanted > 0; ++i) {
      if (!nodes_[i].alive || uniform(0, 1) > options_.leave_at_once * 1.02) continue;
      leave(i, time_s, time_s + uniform(0, kRejoinS));
      --wanted;
    }
    covered_ = false;
    steady_from_s_ = time_s + kRejoinS + kSettleS;
    exodus_s_ = time_s;
  }

  void handle(const Event& event) {
    const double t = event.time_s;
    switch (event.kind) {
      case Kind::kArrive: {
        nodes_[event.node].alive = true;
        supply_ += nodes_[event.node].budget;
        if (supply_ >= needed_ && enough_since_s_ < 0) enough_since_s_ = t;
        const double lifetime_s = std::exponential_distribution<double>(1 / (options_.lifetime_h * 3600))(random_);
        events_.push({t + lifetime_s, event.node, Kind::kLeave});
        events_.push({t, event.node, Kind::kPoll});
        break;
      }
      case Kind::kLeave: leave(event.node, t, t + uniform(0, 1)); break;
      case Kind::kPoll:
        if (!nodes_[event.node].alive) return;
        poll(nodes_[event.node], t);
        events_.push({t + kPollS, event.node, Kind::kPoll});
        break;
    }
  }

  void poll(Node& node, double t) {
    if (!node.coming.empty() && t >= node.ready_s) {
      node.holdings = std::move(node.coming);
      node.coming.clear();
    }
    if (node.holdings.empty() && node.coming.empty()) {
      volunteer(node, t);
      return;
    }
    Coverage c = beat(node.id, node.holdings);
    c.reservation = node.reservation;
    if (node.coming.empty()) node.reservation.clear();
    const auto reply = market_.coverage(std::move(c), at(t));
    KVASIR_CHECK(reply.has_value());
    ++heartbeats_;
    if (t > steady_from_s_) steady_node_s_ += kPollS;
    if (reply->move && node.coming.empty()) {
      volunteer(node, t);
      if (t > steady_from_s_ && !node.coming.empty()) ++steady_moves_;
    }
  }

  void volunteer(Node& node, double t) {
    Offer offer = offer_experts(node.budget);
    offer.worker_id = node.id;
    const auto begin = std::chrono::steady_clock::now();
    const auto answer = market_.volunteer(offer, at(t));
    latencies_ms_.push_back(std::chrono::duration<float, std::milli>(std::chrono::steady_clock::now() - begin).count());
    KVASIR_CHECK(answer.has_value());
    if (!*answer) return;
    for (const Run& run : (*answer)->runs) node.coming.push_back({run.layer, run.begin, run.end});
    node.coming = normalize(std::move(node.coming));
    node.reservation = (*answer)->reservation;
    node.ready_s = t + uniform(kDownloadMinS, kDownloadMaxS);
  }

  // Once a simulated second: which cells are below their target in the hub's eyes?
  void look(double t) {
    std::uint64_t open = 0;
    for (const Run& run : market_.demand("m", at(t))) {
      const bool scarce = run.scarcity() > 0;
      for (std::uint32_t e = run.begin; e < run.end; ++e) {
        double& since = hole_since_[std::size_t{run.layer} * options_.experts + e];
        if (!scarce) {
          since = -1;
          continue;
        }
        ++open;
        if (since < 0) since = t;
        if (t > steady_from_s_ && enough_since_s_ >= 0)
          oldest_hole_s_ = std::max(oldest_hole_s_, t - std::max(since, enough_since_s_));
      }
      if (t > steady_from_s_ && run.held < least_held_) least_held_ = run.held;
    }
    if (!covered_ && open == 0 && enough_since_s_ >= 0) {
      covered_ = true;
      const double polls = std::max(0.0, t - enough_since_s_) / kPollS;
      std::printf("covered at %.0f s, %.1f polls after the supply was enough (%s)\n", t, polls,
                  exodus_s_ < 0 ? "start" : "exodus");
      polls_to_cover_ = std::max(polls_to_cover_, polls);
      if (exodus_s_ < 0) steady_from_s_ = t + kSettleS;
    }
  }

  bool report() {
    std::ranges::sort(latencies_ms_);
    const auto percentile = [&](double p) {
      return static_cast<double>(
          latencies_ms_[static_cast<std::size_t>(p * static_cast<double>(latencies_ms_.size() - 1))]);
    };
    const double moves = steady_node_s_ > 0 ? static_cast<double>(steady_moves_) / (steady_node_s_ / 3600) : 0;
    std::printf("nodes %u, grid %u x %u, target %u, heartbeats %llu\n", options_.nodes, options_.layers,
                options_.experts, market_.options().target, static_cast<unsigned long long>(heartbeats_));
    std::printf("volunteer ms: p50 %.3f p99 %.3f max %.3f (%zu calls)\n", percentile(0.5), percentile(0.99),
                percentile(1), latencies_ms_.size());
    std::printf("steady state: moves per node and hour %.4f; oldest hole %.0f s; least replicas of an expert %u\n",
                moves, oldest_hole_s_, least_held_);
    bool good = true;
    const auto promise = [&](bool kept, const char* what) {
      if (!kept) std::printf("BROKEN: %s\n", what);
      good &= kept;
    };
    promise(covered_, "covered in the end");
    promise(polls_to_cover_ <= kPollsToCoverMax, "covered within 3 polls of enough supply");
    promise(oldest_hole_s_ <= kPollsToCoverMax * kPollS, "in steady state no hole stays open for more than 3 polls");
    promise(moves <= kMovesPerNodeHourMax, "no node moves more than once an hour on average");
    promise(percentile(0.99) <= kVolunteerP99Ms, "volunteer p99 <= 5 ms");
    return good;
  }

  Options options_;
  std::mt19937_64 random_;
  std::vector<std::uint32_t> budgets_;
  std::uint64_t needed_ = 0, supply_ = 0;  // experts
  Market market_;
  std::vector<Node> nodes_;
  std::priority_queue<Event> events_;
  std::vector<double> hole_since_;
  std::vector<float> latencies_ms_;
  double enough_since_s_ = -1, steady_from_s_ = 1e18, exodus_s_ = -1, oldest_hole_s_ = 0, polls_to_cover_ = 0,
         steady_node_s_ = 0;
  bool covered_ = false;
  std::uint64_t heartbeats_ = 0, steady_moves_ = 0;
  std::uint32_t least_held_ = UINT32_MAX;
};

}  // namespace
}  // namespace kvasir::hub

int main(int argc, char** argv) {
  kvasir::hub::Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const double value = std::strtod(argv[i + 1], nullptr);
    if (name == "--nodes") {
      options.nodes = static_cast<std::uint32_t>(value);
    } else if (name == "--layers") {
      options.layers = static_cast<std::uint32_t>(value);
    } else if (name == "--experts") {
      options.experts = static_cast<std::uint32_t>(value);
    } else if (name == "--hours") {
      options.hours = value;
    } else if (name == "--lifetime-hours") {
      options.lifetime_h = value;
    } else if (name == "--leave") {
      options.leave_at_once = value;
    } else if (name == "--seed") {
      options.seed = static_cast<std::uint64_t>(value);
    } else {
      std::fprintf(stderr,
                   "usage: market_sim [--nodes N] [--layers N] [--experts N] [--hours H] [--lifetime-hours H] [--leave "
                   "SHARE] [--seed S]\n");
      return 2;
    }
  }
  return kvasir::hub::Simulation(options).run() ? 0 : 1;
}
