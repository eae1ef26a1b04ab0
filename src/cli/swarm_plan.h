// What a set of machines can do with a model: who holds which experts, what a token costs on
// the wire, and how fast it may come. Pure arithmetic; `kvasir plan` prints it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/expert_set.h"
#include "gguf/moe_model.h"

namespace kvasir::cli {

// What of a model matters here.
struct ModelShape {
  struct Layer {
    std::uint32_t n_expert = 0;
    std::uint64_t bytes_per_expert = 0;
  };
  std::vector<Layer> layers;  // those with experts
  std::uint32_t n_embd = 0;
  std::uint32_t n_used = 1;  // experts a token uses in each layer
  std::uint64_t dense_bytes = 0;

  std::uint64_t expert_bytes() const;
  std::uint32_t n_expert_max() const;
};
ModelShape shape_of(const gguf::MoeModel& model);

// From below and from above; what lies between depends on the machines.
struct Span {
  double low = 0, high = 0;
};

// Measured or assumed speeds of the machines.
struct Speeds {
  // Bytes of experts' weights a worker computes with, per second, one row at a time. One thread
  // was measured at 6 GB/s with cold caches; ordinary machines lie around it.
  Span worker_bytes_per_s{3e9, 12e9};
  // The same for the backbone's dense weights, all threads.
  Span backbone_bytes_per_s{8e9, 40e9};
  double link_bits_per_s = 1e9;  // of the backbone's network link
};

inline constexpr std::size_t kMachinesMax = 4096;
// What the system of a machine, its page cache and its programs keep of its memory.
inline constexpr double kMemoryKept = 0.25;

// "4x8G,16G": memory of each machine, bytes.
Result<std::vector<std::uint64_t>> parse_machines(std::string_view text);

struct Share {
  std::uint64_t memory_bytes = 0;  // of the machine
  Range experts;                   // in every layer that has so many; empty: nothing left for it
  std::uint64_t bytes = 0;         // they take
};

struct SwarmPlan {
  std::vector<Share> shares;          // as the machines were given
  std::uint64_t usable_bytes = 0;     // of all machines
  std::uint64_t missing_bytes = 0;    // experts that fit on no machine
  std::uint32_t copies = 0;           // of every expert the machines have room for; 0: not even one
};
// Contiguous shares in proportion to the machines' memory; as many copies as fit are counted,
// the first is laid out.
SwarmPlan make_plan(const ModelShape& model, const std::vector<std::uint64_t>& machines);
// Machines of one size that hold every expert once.
std::uint64_t machines_needed(const ModelShape& model, std::uint64_t memory_bytes);

struct Cost {
  double workers_asked = 0;          // in each layer, on average
  std::uint64_t bytes_per_token = 0;  // both directions, class exact
  std::uint64_t bytes_per_token_f16 = 0;  // weighted f16 sums, class fast
  Span tokens_per_s;                 // one conversation, one token at a time
};
// `shares` of one copy; a round trip in seconds.
Cost estimate(const ModelShape& model, const std::vector<double>& shares, double rtt_s, const Speeds& speeds);
// The shares of a plan, as parts of 1; what fits nowhere counts as computed by the backbone.
std::vector<double> fractions(const ModelShape& model, const SwarmPlan& plan);

}  // namespace kvasir::cli
