#include "hub/core/traffic.h"

#include <algorithm>

namespace kvasir::hub {
namespace {

// Two reports closer together than this give no rate worth showing.
constexpr Nanos kIntervalMin = std::chrono::milliseconds(200);

double per_second(std::uint64_t count, Nanos time) {
  return static_cast<double>(count) / std::chrono::duration<double>(time).count();
}

}  // namespace

bool Traffic::Reporter::is_live(TimePoint now) const {
  return now - at <= std::clamp(3 * interval, kRateTtl, kRateTtlMax);
}

void Traffic::report(BackboneReport report, TimePoint now) {
  auto found = reporters_.find(report.reporter);
  if (found == reporters_.end()) {
    std::erase_if(reporters_, [&](const auto& entry) { return now - entry.second.at > kReporterTtl; });
    if (reporters_.size() >= kReportersMax)
      reporters_.erase(std::ranges::min_element(reporters_, {}, [](const auto& entry) { return entry.second.at; }));
    // Its first report tells where it stands; what it did before the hub knew it has no rate.
    reporters_.emplace(report.reporter, Reporter{report.counters, now, Nanos::zero(), {}});
    for (std::size_t i = 0; i < totals_.size(); ++i) totals_[i] += report.counters[i];
  } else if (Reporter& reporter = found->second; now - reporter.at >= kIntervalMin) {
    reporter.interval = now - reporter.at;
    Counters grown{};
    // A counter that has fallen was begun anew.
    for (std::size_t i = 0; i < grown.size(); ++i) {
      grown[i] = report.counters[i] >= reporter.last[i] ? report.counters[i] - reporter.last[i] : report.counters[i];
      totals_[i] += grown[i];
    }
    const auto rate = [&](Counter counter) {
      return per_second(grown[static_cast<std::size_t>(counter)], reporter.interval);
    };
    reporter.rates = {.rounds = rate(Counter::kRounds),
                      .pairs = rate(Counter::kPairsRemote) + rate(Counter::kPairsLocal),
                      .local_pairs = rate(Counter::kPairsLocal),
                      .bytes_sent = rate(Counter::kBytesSent),
                      .bytes_received = rate(Counter::kBytesReceived),
                      .hedges = rate(Counter::kHedges),
                      .round_ns = rate(Counter::kRoundNs)};
    reporter.last = report.counters;
    reporter.at = now;
  }
  if (!report.layers.empty()) layers_ = std::move(report.layers);
  for (const auto& [id, told] : report.workers) {
    if (workers_.size() >= kWorkersMax && !workers_.contains(id)) workers_.clear();
    Worker& worker = workers_[id];
    if (told.latency_us) worker.latency_us = told.latency_us;
    if (told.reached) hear(worker, report.reporter, *told.reached, now);
  }
}

void Traffic::hear(Worker& worker, const std::string& reporter, bool reached, TimePoint now) {
  std::erase_if(worker.words, [&](const Word& word) { return word.reporter == reporter || now - word.at > kWordTtl; });
  if (worker.words.size() >= kWordsMax) worker.words.erase(std::ranges::min_element(worker.words, {}, &Word::at));
  worker.words.push_back({reporter, reached, now});
}

Rates Traffic::rates(TimePoint now) const {
  Rates sum;
  for (const auto& [name, reporter] : reporters_) {
    if (!reporter.is_live(now)) continue;
    const Rates& r = reporter.rates;
    sum.rounds += r.rounds;
    sum.pairs += r.pairs;
    sum.local_pairs += r.local_pairs;
    sum.bytes_sent += r.bytes_sent;
    sum.bytes_received += r.bytes_received;
    sum.hedges += r.hedges;
    sum.round_ns += r.round_ns;
  }
  return sum;
}

std::size_t Traffic::backbones(TimePoint now) const {
  return static_cast<std::size_t>(
      std::ranges::count_if(reporters_, [&](const auto& entry) { return entry.second.is_live(now); }));
}

bool Traffic::advance(TimePoint now) {
  if (!sampled_) sampled_ = now - kSampleInterval;
  if (now - *sampled_ < kSampleInterval) return false;
  // After a long silence the missing samples are zeros: nobody was told of any traffic.
  const auto due = static_cast<std::uint64_t>((now - *sampled_) / kSampleInterval);
  *sampled_ += static_cast<std::int64_t>(due) * kSampleInterval;
  if (due > kSamplesMax) next_sample_ += due - kSamplesMax;
  const Rates current = rates(now);
  for (std::uint64_t i = std::min<std::uint64_t>(due, kSamplesMax); i > 0; --i) {
    samples_.push_back({next_sample_++, i == 1 ? current : Rates{}});
    if (samples_.size() > kSamplesMax) samples_.pop_front();
  }
  return true;
}

std::optional<double> Traffic::latency_us(std::string_view worker_id) const {
  const auto found = workers_.find(worker_id);
  return found == workers_.end() ? std::nullopt : found->second.latency_us;
}

bool Traffic::is_silent(std::string_view worker_id, TimePoint now) const {
  const auto found = workers_.find(worker_id);
  if (found == workers_.end()) return false;
  bool missed = false;
  for (const Word& word : found->second.words) {
    if (now - word.at > kWordTtl) continue;
    if (word.reached) return false;
    missed = true;
  }
  return missed;
}

}  // namespace kvasir::hub
