// For tests of the market: models, heartbeats and time in few words.
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "hub/core/market.h"

namespace kvasir::hub {

inline std::function<std::uint64_t()> seeded(std::uint64_t seed) {
  return [random = std::mt19937_64(seed)]() mutable { return random(); };
}

inline ModelShape uniform_model(std::string name, std::uint32_t n_layer, std::uint32_t n_expert,
                                std::uint64_t expert_bytes = 1000) {
  ModelShape shape;
  shape.name = std::move(name);
  shape.n_embd = 64;
  shape.n_expert.assign(n_layer, n_expert);
  shape.bytes_per_expert.assign(n_layer, expert_bytes);
  shape.proof_bytes.assign(n_layer, expert_bytes);
  return shape;
}

inline Coverage beat(std::string worker_id, Segments holdings, std::string model = "m") {
  Coverage out;
  out.worker_id = std::move(worker_id);
  out.owner = "token";
  out.model = std::move(model);
  out.url = "127.0.0.1:1";
  out.holdings = std::move(holdings);
  return out;
}

inline Offer offer_experts(std::uint64_t n, std::string model = "m") {
  Offer offer;
  offer.model = std::move(model);
  offer.experts_max = n;
  offer.owner = "token";
  return offer;
}

inline TimePoint at(double seconds) {
  return TimePoint(std::chrono::microseconds(std::llround(seconds * 1e6)) + std::chrono::hours(1));
}

inline MarketOptions without_proof() {
  MarketOptions options;
  options.proof = false;
  return options;
}

}  // namespace kvasir::hub
