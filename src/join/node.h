// A volunteer's node: takes what the hub finds scarce, fetches it, serves it, and moves when
// it is asked to. Blocks until it is stopped.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "join/conditions.h"
#include "join/heartbeat.h"
#include "join/slice_cache.h"
#include "net/connect.h"

namespace kvasir::join {

// How backbones reach a node: at its port and, where that fails, through the hub's relay; through
// the relay alone; at its port alone.
enum class NodeReach { kBoth, kRelayOnly, kDirectOnly };

// What a node does now, for people to look at.
struct NodeStatus {
  std::string state;  // "waiting for work", "fetching", "serving" or "paused"
  std::string model;
  std::uint64_t experts = 0;
  // Since the node was started:
  std::uint64_t requests = 0, pairs = 0, bytes_received = 0, bytes_sent = 0;
};

struct NodeOptions {
  hub::HubAddress hub;
  std::string model;  // empty: any
  std::uint64_t memory_bytes = 0;
  std::string device = "CPU";
  int n_threads = 1;
  int nice = 0;
  bool tune = true;  // measure plans and speed on what it holds, before it serves
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
  std::function<void(const std::string&)> log, warn;  // `warn` may be empty: `log` then
  std::function<void(const NodeStatus&)> status;  // told twice a second; may be empty
  // The worker's figures for Prometheus, while it serves: in a file, at a port, or neither.
  std::string metrics_file;
  std::optional<net::HostPort> metrics_port;
  std::function<bool(Nanos)> wait;  // false: stop
};

Status run_node(NodeOptions options);

}  // namespace kvasir::join
