// A volunteer's node: takes what the hub finds scarce, fetches it, serves it, and moves when
// it is asked to. Blocks until it is stopped.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "join/conditions.h"
#include "join/heartbeat.h"
#include "join/slice_cache.h"
#include "net/connect.h"

namespace kvasir::join {

// How backbones reach a node: at its port and, where that fails, through the hub's relay; through
// the relay alone; at its port alone.
enum class NodeReach { kBoth, kRelayOnly, kDirectOnly };

struct NodeOptions {
  hub::HubAddress hub;
  std::string model;  // empty: any
  std::uint64_t memory_bytes = 0;
  std::string device = "CPU";
  int n_threads = 1;
  int nice = 0;
  net::HostPort listen;
  bool tls = true;
  NodeReach reach = NodeReach::kDirectOnly;  // with a relay, `tls` must be set
  std::string advertise;
  std::filesystem::path data_dir;   // identity and worker id
  std::filesystem::path cache_dir;  // slices
  FetchOptions fetch;               // quota, caps and progress; `wait` and `log` are the node's
  Conditions conditions;
  Nanos conditions_interval = std::chrono::seconds(5);
  std::function<MachineState()> look = [] { return look_at_machine(); };
  bool once = false;  // fetch, let the hub count it, print the files, end
  std::string software;
  std::function<void(const std::string&)> log;
  std::function<bool(Nanos)> wait;  // false: stop
};

Status run_node(NodeOptions options);

}  // namespace kvasir::join
