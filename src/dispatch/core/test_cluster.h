// For tests of the core: workers of one layer, whose answers are given by hand.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "dispatch/core/round_engine.h"

namespace kvasir::dispatch::testing {

using namespace std::chrono_literals;

inline wire::LayerId layer_id(std::uint8_t n) {
  wire::LayerId id{};
  id[0] = std::byte{n};
  return id;
}

inline wire::Holdings holds(std::uint32_t begin, std::uint32_t end, std::uint8_t layer = 1) {
  wire::Holding entry{.layer_id = layer_id(layer), .layer = layer, .n_expert = 64, .n_embd = 4, .experts = {}};
  entry.experts.add({begin, end});
  return {{entry}};
}

// A round on a tiny cluster: worker w holds what the test says; answers are given by hand.
struct Cluster {
  explicit Cluster(std::size_t n, bool local = true, Tuning t = {}) : tuning(t), fleet(n, t, 3), engine(n, local, t) {}

  void up(WorkerIndex w, wire::Holdings holdings) {
    fleet.on_connected(w, 1ms);
    fleet.on_holdings(w, std::move(holdings));
    engine.link_up(w);
  }
  void measure(WorkerIndex w, Nanos latency) {
    for (int i = 0; i < 64; ++i)
      for (std::uint32_t size : {1u, 2u, 4u, 8u, 16u})
        fleet.apply({.kind = Report::Kind::kAnswer, .worker = w, .pairs = size, .latency = latency}, now);
  }
  Status begin(std::vector<wire::Pair> p, std::uint32_t n_rows = 4) {
    pairs = std::move(p);
    written.assign(pairs.size(), 0);
    return engine.begin(fleet, {.key = {layer_id(1)}, .layer = 1, .n_expert = 64, .n_rows = n_rows, .n_embd = 4,
                                .request_rows_max = 1024, .request_pairs_max = 4096, .pairs = pairs}, now);
  }
  // Weighted sums, in f16 unless told otherwise; the weight of pair i is i + 1.
  Status begin_sums(std::vector<wire::Pair> p, wire::RowType type = wire::RowType::kF16) {
    pairs = std::move(p);
    written.assign(pairs.size(), 0);
    weights.resize(pairs.size());
    for (std::size_t i = 0; i < pairs.size(); ++i) weights[i] = static_cast<float>(i + 1);
    return engine.begin(fleet, {.key = {layer_id(1)}, .layer = 1, .n_expert = 64, .n_rows = 4, .n_embd = 4, .row_type = type,
                                .result_type = type, .request_rows_max = 1024, .request_pairs_max = 4096, .pairs = pairs,
                                .weights = weights}, now);
  }
  // Takes over the orders to send.
  std::vector<Request> sent() {
    std::vector<Request> out;
    for (std::uint32_t i : engine.to_send) out.push_back(engine.request(i));
    engine.to_send.clear();
    return out;
  }
  Verdict answer(const Request& request, bool finite = true, std::uint32_t n_embd = 4) {
    const auto n = static_cast<std::uint32_t>(request.pairs.size());
    return engine.on_result(request.worker, request.id, {.n_embd = n_embd, .first_row = 0, .n_rows = n, .total_rows = n}, false, now,
                            [&](std::uint32_t, std::uint32_t pair) {
                              if (finite) ++written[pair];
                              return finite ? RowState::kFinite : RowState::kNan;
                            });
  }
  // A frame of the sums that a worker gives: rows [first, first + n) of the request's.
  Verdict answer_sums(const Request& request, std::uint32_t first, std::uint32_t n, RowState state = RowState::kFinite) {
    const auto total = static_cast<std::uint32_t>(request.rows.size());
    return engine.on_result(request.worker, request.id,
                            {.row_type = request.result_type, .n_embd = 4, .first_row = first, .n_rows = n, .total_rows = total},
                            first + n < total, now, [&](std::uint32_t i, std::uint32_t row) {
                              if (state == RowState::kFinite)
                                for (std::size_t p = 0; p < request.pairs.size(); ++p)
                                  if (request.wire_pairs[p].row == first + i) {
                                    EXPECT_EQ(pairs[request.pairs[p]].row, row);
                                    EXPECT_EQ(request.weights[p], weights[request.pairs[p]]);
                                    ++written[request.pairs[p]];
                                  }
                              return state;
                            });
  }
  Verdict answer_sums(const Request& request, RowState state = RowState::kFinite) {
    return answer_sums(request, 0, static_cast<std::uint32_t>(request.rows.size()), state);
  }
  void step(Nanos by) {
    now += by;
    if (engine.needs_advance(now)) engine.advance(fleet, now);
  }
  void run_local(bool finite = true) {
    for (std::uint32_t pair : engine.take_local(false)) ++written[pair];
    engine.local_done(Nanos(0), [&](std::uint32_t) { return finite; });
  }

  Tuning tuning;
  TimePoint now{1s};
  Fleet fleet;
  RoundEngine engine;
  std::vector<wire::Pair> pairs;
  std::vector<float> weights;
  std::vector<int> written;  // per pair: answers counted
};

inline const std::vector<wire::Pair> kTwoRows = {{0, 1}, {0, 9}, {1, 9}, {1, 3}, {3, 1}};

}  // namespace kvasir::dispatch::testing
