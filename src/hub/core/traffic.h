// What backbones say of themselves, made into rates: a backbone reports counters since its
// start now and then, and the hub shows what goes on now and over the last minutes.
//
// A state machine: every call gives the time; one caller at a time. Figures are for people
// and for graphs; nothing is decided by them.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"

namespace kvasir::hub {

// Since the backbone's start; docs/configuration.md says what each counts.
enum class Counter : std::uint8_t {
  kRounds,
  kPairsRemote,
  kPairsLocal,
  kBytesSent,
  kBytesReceived,
  kHedges,
  kLateAnswers,
  kInvalidAnswers,
  kWorkersLost,
  kReconnects,
  kRoundNs,
};
inline constexpr std::array<std::string_view, 11> kCounterNames = {
    "rounds",       "pairs_remote",    "pairs_local",  "bytes_sent", "bytes_received", "hedges",
    "late_answers", "invalid_answers", "workers_lost", "reconnects", "round_ns_sum"};
using Counters = std::array<std::uint64_t, kCounterNames.size()>;

struct LayerLatency {
  std::uint32_t layer = 0;
  std::uint64_t rounds = 0;
  double mean_us = 0;
  double p99_us = 0;  // 99 of 100 rounds stayed below
  friend bool operator==(const LayerLatency&, const LayerLatency&) = default;
};

struct BackboneReport {
  std::string reporter;  // the same for every report of one process
  Counters counters{};
  std::vector<LayerLatency> layers;  // empty: not told
  struct Worker {
    std::optional<double> latency_us;  // of an answer, lately
    std::optional<bool> reached;       // whether it answers that backbone
  };
  std::map<std::string, Worker> workers;  // by id
};

struct Rates {  // a second, over all backbones
  double rounds = 0, pairs = 0, local_pairs = 0, bytes_sent = 0, bytes_received = 0, hedges = 0;
  double round_ns = 0;  // time inside rounds
  friend bool operator==(const Rates&, const Rates&) = default;
  double local_share() const { return pairs > 0 ? local_pairs / pairs : 0; }
  double round_ms() const { return rounds > 0 ? round_ns / rounds / 1e6 : 0; }
};

class Traffic {
 public:
  static constexpr Nanos kSampleInterval = std::chrono::seconds(2);
  static constexpr std::size_t kSamplesMax = 300;  // ten minutes
  static constexpr std::size_t kReportersMax = 256;
  static constexpr std::size_t kWorkersMax = 65'536;  // of which something is known
  static constexpr std::size_t kWordsMax = 4;         // backbones whose word on one worker is kept: the last ones
  static constexpr Nanos kWordTtl = std::chrono::seconds(25);
  // A backbone that has not reported for this long, or for three of its own intervals, is idle
  // or gone.
  static constexpr Nanos kRateTtl = std::chrono::seconds(10), kRateTtlMax = std::chrono::minutes(2);
  static constexpr Nanos kReporterTtl = std::chrono::minutes(10);

  void report(BackboneReport report, TimePoint now);
  // Takes the samples that are due; true if it took one.
  bool advance(TimePoint now);

  struct Sample {
    std::uint64_t number = 0;  // counts up
    Rates rates;
  };
  const std::deque<Sample>& samples() const { return samples_; }
  Rates rates(TimePoint now) const;
  std::size_t backbones(TimePoint now) const;  // that report
  // Of all backbones since this object was made.
  const Counters& totals() const { return totals_; }
  // As the backbone told that reported last.
  const std::vector<LayerLatency>& layers() const { return layers_; }
  std::optional<double> latency_us(std::string_view worker_id) const;
  // Some backbone gets no answer from it, and none says that it does.
  bool is_silent(std::string_view worker_id, TimePoint now) const;

 private:
  struct Reporter {
    Counters last{};
    TimePoint at{};
    Nanos interval{};
    Rates rates;
    bool is_live(TimePoint now) const;
  };

  std::map<std::string, Reporter> reporters_;
  Counters totals_{};
  std::vector<LayerLatency> layers_;
  struct Word {
    std::string reporter;
    bool reached = false;
    TimePoint at{};
  };
  struct Worker {
    std::optional<double> latency_us;
    std::vector<Word> words;
  };
  void hear(Worker& worker, const std::string& reporter, bool reached, TimePoint now);

  std::map<std::string, Worker, std::less<>> workers_;
  std::deque<Sample> samples_;
  std::uint64_t next_sample_ = 0;
  std::optional<TimePoint> sampled_;
};

}  // namespace kvasir::hub
