// What the market keeps; shared by the files that implement it and by nobody else.
#pragma once

#include "hub/core/market.h"

namespace kvasir::hub {

struct Market::Model {
  Model(ModelShape model_shape, std::uint32_t target)
      : shape(std::move(model_shape)), grid(shape.n_expert, target), targets(shape.n_expert, target) {}
  ModelShape shape;
  CoverageGrid grid;
  Targets targets;
  std::optional<TimePoint> scarce_since;
};

struct Market::Node {
  std::string worker_id, owner, url, fingerprint, ticket, device;
  Model* model = nullptr;
  Segments claimed;
  Segments counted;  // the proved part of it
  double speed = 0;
  std::uint64_t capacity_bytes = 0;
  std::uint32_t weight = kWeightUnit;  // in the grid now, if in_grid
  bool in_grid = false;
  bool draining = false;
  bool lost = false;  // its line has ended, and nothing was heard since
  std::optional<TimePoint> line_ended;
  std::optional<TimePoint> moving_since, last_moved;
  TimePoint joined{}, seen{};
  std::list<Node*>::iterator age;

  struct OpenChallenge {
    Challenge challenge;
    Segments claims;  // what passing it proves
    TimePoint expires;
  };
  std::optional<OpenChallenge> open;
  TimePoint next_recheck{}, barred_until{};
  std::uint32_t failures = 0;
};

struct Market::Reservation {
  std::string id, owner, worker_id;
  Model* model = nullptr;
  Segments segments;
  TimePoint created{}, expires{};
};

}  // namespace kvasir::hub
