#include "cli/swarm_plan.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <format>
#include <numeric>
#include <optional>

#include "wire/codec.h"

namespace kvasir::cli {
namespace {

// A sleeping thread wakes late; measured over loopback, once on either side.
constexpr Span kWakeSeconds{30e-6, 300e-6};
// The slowest of the workers asked decides: at 30 ms a layer took 40 ms in the field.
constexpr double kSlowestOfMany = 1.4;
// Experts no worker holds come from the backbone's copy: from memory at best, from a disk at worst.
constexpr Span kLocalBytesPerS{0.3e9, 12e9};

std::optional<std::uint64_t> parse_size(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(end, text.data() + text.size());
  if (error != std::errc{} || !(value > 0)) return std::nullopt;
  constexpr std::string_view kUnits = "KMGT";
  if (unit.empty()) return std::nullopt;  // 8 is 8 bytes, and surely not meant
  const std::size_t power = kUnits.find(static_cast<char>(unit.front() & ~0x20));
  if (power == std::string_view::npos || (unit.size() > 1 && unit.substr(1) != "B" && unit.substr(1) != "iB"))
    return std::nullopt;
  value *= std::pow(1024.0, static_cast<double>(power + 1));
  if (value > 1e15) return std::nullopt;
  return static_cast<std::uint64_t>(value);
}

// What expert number `id` of all layers takes.
std::uint64_t bytes_of_column(const ModelShape& model, std::uint32_t id) {
  std::uint64_t bytes = 0;
  for (const ModelShape::Layer& layer : model.layers)
    if (id < layer.n_expert) bytes += layer.bytes_per_expert;
  return bytes;
}

std::uint64_t usable_of(std::uint64_t memory_bytes) {
  return static_cast<std::uint64_t>(static_cast<double>(memory_bytes) * (1 - kMemoryKept));
}

}  // namespace

std::uint64_t ModelShape::expert_bytes() const {
  std::uint64_t bytes = 0;
  for (const Layer& layer : layers) bytes += layer.n_expert * layer.bytes_per_expert;
  return bytes;
}

std::uint32_t ModelShape::n_expert_max() const {
  std::uint32_t n = 0;
  for (const Layer& layer : layers) n = std::max(n, layer.n_expert);
  return n;
}

ModelShape shape_of(const gguf::MoeModel& model) {
  ModelShape shape{.layers = {}, .n_embd = model.n_embd(), .n_used = std::max(1u, model.n_expert_used()), .dense_bytes = 0};
  for (const gguf::LayerExperts& layer : model.layers()) shape.layers.push_back({layer.n_expert, layer.bytes_per_expert()});
  // In a backbone file the experts are placeholders, which take next to nothing.
  const std::uint64_t total = model.files().total_bytes();
  const std::uint64_t experts = model.kind() == gguf::FileKind::kBackbone ? 0 : shape.expert_bytes();
  shape.dense_bytes = total - std::min(total, experts);
  return shape;
}

Result<std::vector<std::uint64_t>> parse_machines(std::string_view text) {
  std::vector<std::uint64_t> machines;
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), item.size() + 1));
    std::size_t count = 1;
    std::string_view size = item;
    if (const std::size_t x = item.find('x'); x != std::string_view::npos) {
      const auto [end, error] = std::from_chars(item.data(), item.data() + x, count);
      if (error != std::errc{} || end != item.data() + x) count = 0;
      size = item.substr(x + 1);
    }
    const std::optional<std::uint64_t> bytes = parse_size(size);
    if (!bytes || count == 0 || count > kMachinesMax - machines.size())
      return fix_input(std::format("'{}' is no list of machines; write their memory as 4x8G,16G (at most {} machines).",
                                   item, kMachinesMax));
    machines.insert(machines.end(), count, *bytes);
  }
  if (machines.empty()) return fix_input("name the machines' memory as 4x8G,16G.");
  return machines;
}

SwarmPlan make_plan(const ModelShape& model, const std::vector<std::uint64_t>& machines) {
  SwarmPlan plan;
  const std::uint32_t n = model.n_expert_max();
  std::vector<std::uint64_t> column(n);
  for (std::uint32_t id = 0; id < n; ++id) column[id] = bytes_of_column(model, id);
  for (const std::uint64_t memory : machines) plan.usable_bytes += usable_of(memory);
  const std::uint64_t wanted = model.expert_bytes();
  plan.copies = wanted == 0 ? 0 : static_cast<std::uint32_t>(std::min<std::uint64_t>(plan.usable_bytes / wanted, 1'000'000));
  // In proportion to memory if all fits, else as much as fits: a machine is filled up to a mark
  // on the way from nothing to everything.
  const double fill = plan.usable_bytes == 0 ? 0 : std::min(1.0, static_cast<double>(wanted) / static_cast<double>(plan.usable_bytes));
  std::uint32_t next = 0;
  double mark = 0;
  std::uint64_t laid = 0;
  for (std::size_t i = 0; i < machines.size(); ++i) {
    Share share{.memory_bytes = machines[i], .experts = {next, next}, .bytes = 0};
    mark += static_cast<double>(usable_of(machines[i])) * fill;
    const bool last = i + 1 == machines.size();
    // A column goes to the machine in whose part its middle lies; the last takes the rest. Nobody takes
    // more than it has room for.
    while (next < n && share.bytes + column[next] <= usable_of(machines[i]) &&
           ((last && fill < 1) || static_cast<double>(laid) + static_cast<double>(column[next]) / 2 <= mark)) {
      share.bytes += column[next];
      laid += column[next];
      share.experts.end = ++next;
    }
    plan.shares.push_back(share);
  }
  plan.missing_bytes = wanted - laid;
  return plan;
}

std::uint64_t machines_needed(const ModelShape& model, std::uint64_t memory_bytes) {
  const std::uint32_t n = model.n_expert_max();
  if (n == 0) return 0;
  const std::uint64_t columns = usable_of(memory_bytes) / std::max<std::uint64_t>(1, bytes_of_column(model, 0));
  if (columns == 0) {
    // Not one expert of every layer fits: a machine then holds some layers only.
    const std::uint64_t usable = std::max<std::uint64_t>(1, usable_of(memory_bytes));
    return (model.expert_bytes() + usable - 1) / usable;
  }
  return (n + columns - 1) / columns;
}

std::vector<double> fractions(const ModelShape& model, const SwarmPlan& plan) {
  std::vector<double> out;
  const double n = std::max(1u, model.n_expert_max());
  for (const Share& share : plan.shares) out.push_back((share.experts.end - share.experts.begin) / n);
  return out;
}

Cost estimate(const ModelShape& model, const std::vector<double>& shares, double rtt_s, const Speeds& speeds) {
  const double k = model.n_used;
  double asked = 0, remote = 0, largest = 0;
  for (const double share : shares) {
    asked += 1 - std::pow(1 - share, k);  // asked for at least one of the k
    remote += share;
    largest = std::max(largest, share);
  }
  remote = std::min(1.0, remote);
  const double n_layer = static_cast<double>(model.layers.size());
  const double mean_expert = n_layer == 0 ? 0 : static_cast<double>(model.expert_bytes()) /
                                                    std::accumulate(model.layers.begin(), model.layers.end(), 0.0,
                                                                    [](double sum, const auto& l) { return sum + l.n_expert; });
  // Experts the busiest worker computes: its mean from below, two deviations more from above.
  const double mean_load = k * largest;
  const Span load{remote > 0 ? std::max(1.0, mean_load) : 0,
                  remote > 0 ? std::clamp(mean_load + 2 * std::sqrt(mean_load * (1 - largest)), 1.0, k) : 0};

  const double request = wire::kHeaderBytes + wire::kExecHeadBytes, answer = wire::kHeaderBytes + wire::kResultHeadBytes;
  const double exact = asked * (request + answer + 4.0 * model.n_embd) + k * remote * (wire::kPairBytes + 4.0 * model.n_embd);
  const double f16 = asked * (request + answer + 2 * 2.0 * model.n_embd) + k * remote * (wire::kPairBytes + 4.0);

  Cost cost{.workers_asked = asked, .bytes_per_token = static_cast<std::uint64_t>(exact * n_layer),
            .bytes_per_token_f16 = static_cast<std::uint64_t>(f16 * n_layer), .tokens_per_s = {}};
  const double wire_s = exact * 8 / speeds.link_bits_per_s;
  const double local = k * (1 - remote) * mean_expert;
  const double dense = static_cast<double>(model.dense_bytes);
  const auto token = [&](double round_trip, double wake, double n_experts, double worker, double local_speed, double backbone) {
    const double away = remote > 0 ? round_trip + wake + wire_s + n_experts * mean_expert / worker : 0;
    return n_layer * (away + local / local_speed) + dense / backbone;
  };
  cost.tokens_per_s.low = 1 / token(rtt_s * kSlowestOfMany, kWakeSeconds.high, load.high, speeds.worker_bytes_per_s.low,
                                    kLocalBytesPerS.low, speeds.backbone_bytes_per_s.low);
  cost.tokens_per_s.high = 1 / token(rtt_s, kWakeSeconds.low, load.low, speeds.worker_bytes_per_s.high, kLocalBytesPerS.high,
                                     speeds.backbone_bytes_per_s.high);
  return cost;
}

}  // namespace kvasir::cli
