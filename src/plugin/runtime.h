// What the plugin keeps for the whole process: settings, the dispatcher, the layers seen so
// far, and the counters. Made when ggml loads the library; never destroyed, because
// llama.cpp may free buffers after static destructors have begun.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/mutex.h"
#include "dispatch/dispatcher.h"
#include "plugin/config.h"
#include "plugin/expert_graph.h"
#include "plugin/hub_follower.h"
#include "plugin/state_files.h"

namespace kvasir::plugin {

// One line on stderr, "kvasir: …". Any thread.
void log_line(std::string_view text);

class Runtime {
 public:
  // Null while the library was refused (its sentence is already logged).
  static Runtime* instance();
  static Status create(Config config);

  const Config& config() const { return config_; }

  // Made at first use, so that listing devices contacts nobody; the same error ever after.
  Result<dispatch::Dispatcher*> dispatcher();

  // The dispatcher's handle of the layer an FFN belongs to. Reads samples of its weights once.
  Result<const dispatch::Layer*> layer_of(const ExpertFfn& ffn);
  // Weights in [begin, begin + bytes) are gone: a later tensor at the same address is another.
  void forget(const void* begin, std::size_t bytes);

  // Logged once per distinct text, and counted for the statistics.
  void note_unknown(const std::string& text);

  void count_local_split() { local_splits_.fetch_add(1, std::memory_order_relaxed); }
  void count_overlapped() { rounds_overlapped_.fetch_add(1, std::memory_order_relaxed); }
  std::string stats_json();
  std::string metrics_text();

 private:
  explicit Runtime(Config config) : config_(std::move(config)) {}
  void start_stats();
  void watch_coverage();
  bool follows_hub() const { return config_.hub && config_.dispatch.local != dispatch::LocalPolicy::kOnly; }
  Status start_follower();
  Result<const dispatch::Layer*> register_layer(const ExpertFfn& ffn);

  Config config_;
  std::unique_ptr<StateFiles> state_files_;
  std::once_flag dispatcher_once_;
  std::unique_ptr<dispatch::Dispatcher> dispatcher_;
  std::atomic<dispatch::Dispatcher*> made_{nullptr};  // the same, once it is there, for threads that do not make it
  std::shared_ptr<SessionGrants> grants_;  // with KVASIR_HUB
  std::unique_ptr<HubFollower> follower_;  // with KVASIR_HUB
  Status dispatcher_status_;

  Mutex registering_;  // one layer at a time; taken before mutex_
  Mutex mutex_;        // held briefly
  std::map<const void*, const dispatch::Layer*> layers_ KVASIR_GUARDED_BY(mutex_);  // by address of the down weights
  std::set<std::string> unknown_ KVASIR_GUARDED_BY(mutex_);
  std::atomic<std::uint64_t> local_splits_{0}, rounds_overlapped_{0};
};

}  // namespace kvasir::plugin
