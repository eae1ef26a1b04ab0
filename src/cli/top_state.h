// What `kvasir top` knows: the hub's server-sent events, put together (docs/dashboard.md).
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvasir::cli {

struct TopWorker {
  std::string id, state, device, path, url;
  std::uint64_t memory_bytes = 0, experts = 0;
  double speed_rows_per_s = 0;
  std::optional<double> latency_us;
};

struct TopTraffic {
  double rounds = 0, local_share = 0, sent = 0, received = 0, hedges = 0, round_ms = 0;
  std::optional<double> tokens;
  std::uint64_t backbones = 0;
};

// How well a cell is covered, the worst first.
enum class Cover : std::uint8_t { kNone, kScarce, kPart, kFull };

struct TopState {
  static constexpr std::size_t kSamplesMax = 300;
  static constexpr std::size_t kEventBytesMax = 64u << 20;

  std::string hub_version, model;
  bool known = false;
  std::vector<std::string> models;
  std::vector<std::vector<Cover>> cells;  // [layer][expert]
  std::uint64_t replicas_missing = 0;
  std::uint64_t workers_total = 0;
  std::vector<TopWorker> workers;
  TopTraffic traffic;
  std::deque<double> rounds;                           // a second, of the last samples; oldest first
  std::optional<std::array<double, 3>> slowest_layer;  // layer, mean and 99 % of its rounds, us

  // Takes bytes as they come; false: this is not the hub's language.
  bool feed(const char* bytes, std::size_t n);
  bool complete() const { return seen_workers_; }  // a first picture can be shown

  struct Sum {
    std::uint64_t experts = 0, full = 0, none = 0;
  };
  Sum sum() const;

 private:
  void apply(std::string_view event, const nlohmann::json& data);
  void hello(const nlohmann::json& data);

  std::string text_;
  std::vector<std::uint64_t> missing_;  // by layer
  bool seen_workers_ = false;
};

}  // namespace kvasir::cli
