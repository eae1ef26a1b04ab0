// Client, third part: what must hold in every round.
#include "sim/client.h"

#include <algorithm>

namespace kvasir::sim {

using namespace std::chrono_literals;

namespace {

// Compares by value, and fails the run when an honest worker is accused.
class JudgedRows final : public dispatch::CheckedRows {
 public:
  JudgedRows(World& world, const std::vector<std::unique_ptr<Worker>>& workers, std::vector<std::uint64_t>& out,
             const std::vector<std::uint64_t>& opinions)
      : world_(world), workers_(workers), out_(out), opinions_(opinions) {}
  bool answer_agrees(std::uint32_t pair, std::uint32_t slot) const override { return out_[pair] == opinions_[slot]; }
  bool slots_agree(std::uint32_t a, std::uint32_t b) const override { return opinions_[a] == opinions_[b]; }
  void replace_answer(std::uint32_t pair, std::uint32_t slot) override { out_[pair] = opinions_[slot]; }
  void lie_found(const dispatch::Evidence& evidence) override {
    world_.trace("worker %u is caught lying", evidence.worker);
    if (workers_[evidence.worker]->lies_told == 0) world_.fail("an honest worker was blamed");
  }

 private:
  World& world_;
  const std::vector<std::unique_ptr<Worker>>& workers_;
  std::vector<std::uint64_t>& out_;
  const std::vector<std::uint64_t>& opinions_;
};

}  // namespace

void Client::judge(Driver& driver) {
  JudgedRows rows(world_, workers_, driver.out, driver.opinions);
  driver.engine->judge_checks(rows);
}

void Client::check_round(Driver& driver, const Status& status) {
  // Every request is waited for until its second deadline at most, and a lost expert
  // (without local compute) for the wait allowed; all else is compute of our own.
  const Nanos slack = 50ms + tuning_.no_replica_retry;
  Nanos limit = driver.last_final - driver.started + driver.computed + slack;
  if (!plan_.local_allowed) limit += tuning_.no_replica_wait;
  const Nanos took = world_.now() - driver.started;
  if (took > limit)
    world_.fail("a round took " + std::to_string(took.count() / 1000) + " us, allowed were " + std::to_string(limit.count() / 1000));
  if (!status) {
    ++failed_rounds_;
    world_.trace("round fails: %s", status.error().message.c_str());
    if (plan_.local_allowed) world_.fail("a round failed although local compute is allowed: " + status.error().message);
    if (!status.error().message.contains("layer " + std::to_string(driver.layer)) || !status.error().message.contains("expert"))
      world_.fail("an error that does not name layer and experts: " + status.error().message);
    if (remote_demanded_) world_.fail("a round failed though every worker is well: " + status.error().message);
    return;
  }
  check_values(driver);
  if (remote_demanded_ && driver.engine->counters().pairs_local != driver.local_before)
    world_.fail("pairs were computed locally though every worker is well");
}

void Client::check_request(const Driver& driver, const dispatch::Request& request) {
  if (plan_.weighted && request.weights.size() != request.pairs.size()) return world_.fail("a pair travels without its weight");
  for (std::size_t i = 0; i < request.wire_pairs.size(); ++i) {
    const std::uint32_t expert = request.wire_pairs[i].expert;
    const auto in_request = std::ranges::count(request.wire_pairs, expert, &wire::Pair::expert);
    const auto in_round = std::ranges::count(driver.pairs, expert, &wire::Pair::expert);
    // Per pair, all rows of an expert share a request; sums are asked of what is missing.
    if (!plan_.weighted && in_request != in_round) world_.fail("an expert's pairs were split over requests");
    if (plan_.weighted && request.weights[i] != driver.weights[request.pairs[i]]) world_.fail("a pair travels with another's weight");
  }
}

void Client::check_values(const Driver& driver) {
  std::vector<std::uint64_t> sums(driver.rows.size(), 0);
  for (std::size_t i = 0; i < driver.pairs.size(); ++i) {
    const wire::Pair pair = driver.pairs[i];
    const std::uint64_t value = oracle(driver.layer, driver.rows[pair.row], pair.expert);
    if (plan_.weighted) {
      sums[pair.row] += static_cast<std::uint64_t>(driver.weights[i]) * value;
      continue;
    }
    if (driver.written[i] != 1) return world_.fail("a pair was answered " + std::to_string(driver.written[i]) + " times");
    if (driver.out[i] == value) continue;
    ++wrong_answers_;
    // Unchecked, or with nobody to judge between two, a lie passes.
    const bool may_be_fooled = std::ranges::any_of(workers_, [](const auto& worker) { return worker->lies_told > 0; }) &&
                               (plan_.spot_check < 1 || !plan_.local_allowed);
    if (!may_be_fooled) return world_.fail("a pair has another answer than the oracle's");
  }
  if (plan_.weighted && driver.out != sums) world_.fail("a row's sum is not the oracle's: a pair counts twice, or not at all");
}

}  // namespace kvasir::sim
