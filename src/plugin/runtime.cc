#include "plugin/runtime.h"

#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <format>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/check.h"
#include "base/log_limit.h"
#include "ffn/engine.h"
#include "plugin/coverage_notice.h"
#include "plugin/layer_identity.h"
#include "plugin/layer_upload.h"
#include "plugin/metrics.h"
#include "plugin/traffic_report.h"

namespace kvasir::plugin {
namespace {

Runtime* g_runtime = nullptr;

constexpr auto kStatsPeriod = std::chrono::seconds(1);
constexpr auto kCoveragePeriod = std::chrono::seconds(2);
// A model has one entry per activation it uses; more means that the entries are not distinct.
constexpr std::size_t kUnknownMax = 256;

std::uint64_t bytes_per_expert(const ExpertFfn& ffn) {
  std::uint64_t bytes = 0;
  for (const ggml_tensor* t : {ffn.tensors.gate, ffn.tensors.up, ffn.tensors.gate_up, ffn.tensors.down})
    if (t != nullptr) bytes += t->nb[2];
  return bytes;
}

nlohmann::ordered_json workers_json(const dispatch::Dispatcher& dispatcher) {
  auto out = nlohmann::ordered_json::array();
  for (const dispatch::WorkerView& w : dispatcher.workers())
    out.push_back({{"name", w.name},
                   {"state", w.state},
                   {"answers", w.answers},
                   {"pairs", w.pairs},
                   {"answer_ns_sum", w.answer_time_sum.count()},
                   {"round_trip_ns", w.round_trip.count()}});
  return out;
}

nlohmann::ordered_json layers_json(const dispatch::Dispatcher& dispatcher) {
  auto out = nlohmann::ordered_json::array();
  for (const dispatch::LayerTimes& times : dispatcher.layer_times()) out.push_back(layer_times_json(times));
  return out;
}

}  // namespace

void log_line(std::string_view text) {
  const std::string line = std::format("kvasir: {}\n", text);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

Runtime* Runtime::instance() { return g_runtime; }

Status Runtime::create(Config config) {
  KVASIR_CHECK(g_runtime == nullptr);
  g_runtime = new Runtime(std::move(config));
  g_runtime->start_stats();
  return {};
}

void Runtime::start_stats() {
  std::vector<StateFiles::File> files;
  if (!config_.stats_file.empty()) files.push_back({config_.stats_file, [this] { return stats_json() + '\n'; }});
  if (!config_.metrics_file.empty()) files.push_back({config_.metrics_file, [this] { return metrics_text(); }});
  const bool any = !files.empty();
  state_files_ = std::make_unique<StateFiles>(std::move(files));
  if (any) {
    // No signal of llama.cpp's on this thread: a handler that ends the process would wait for the lock it holds.
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([this] {
      while (true) {
        state_files_->write();
        std::this_thread::sleep_for(kStatsPeriod);
      }
    }).detach();
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  if (config_.stats_at_exit || any) {
    std::atexit([] {
      Runtime& runtime = *g_runtime;
      runtime.state_files_->write_last();
      if (runtime.config_.stats_at_exit) log_line("stats " + runtime.stats_json());
    });
  }
}

Result<dispatch::Dispatcher*> Runtime::dispatcher() {
  std::call_once(dispatcher_once_, [this] {
    dispatch::Options options = config_.dispatch;
    options.log = [](std::string line) { log_line(line); };
    Result<wire::NumericsId> id = ffn::numerics_id();
    if (!id) {
      dispatcher_status_ = std::unexpected(id.error());
      return;
    }
    options.numerics_id = *std::move(id);
    if (follows_hub()) {
      auto grants = SessionGrants::make();
      if (!grants) {
        dispatcher_status_ = std::unexpected(grants.error());
        return;
      }
      grants_ = *std::move(grants);
      options.grants = grants_->source();
    }
    auto made = dispatch::Dispatcher::create(std::move(options));
    if (!made) {
      dispatcher_status_ = std::unexpected(made.error());
      return;
    }
    dispatcher_ = *std::move(made);
    made_ = dispatcher_.get();
    watch_coverage();
    dispatcher_status_ = start_follower();
  });
  if (!dispatcher_status_) return std::unexpected(dispatcher_status_.error());
  return dispatcher_.get();
}

void Runtime::watch_coverage() {
  if (config_.dispatch.local != dispatch::LocalPolicy::kFallback || (config_.dispatch.workers.empty() && !config_.hub)) return;
  if (config_.dispatch.hot_bytes_max > 0) return;  // local work is then a choice, and no sign of anything
  std::thread([dispatcher = dispatcher_.get()] {
    CoverageNotice notice;
    while (true) {
      std::this_thread::sleep_for(kCoveragePeriod);
      const dispatch::Stats stats = dispatcher->stats();
      if (const auto sentence = notice.look(stats.pairs_remote, stats.pairs_local)) log_line(*sentence);
    }
  }).detach();
}

Status Runtime::start_follower() {
  if (!follows_hub()) return {};
  HubFollower::Options options{
      .hub = *config_.hub, .grants = grants_, .log = limited_log([](const std::string& line) { log_line(line); })};
  KVASIR_ASSIGN(follower_, HubFollower::start(std::move(options), *dispatcher_));
  // The hub is told what was done since the last report. After libcurl's first use, so that this
  // runs before TLS is torn down.
  std::atexit([] { g_runtime->follower_.reset(); });
  return {};
}

Result<const dispatch::Layer*> Runtime::layer_of(const ExpertFfn& ffn) {
  const void* key = ffn.tensors.down->data;
  const auto known = [&]() -> const dispatch::Layer* {
    const MutexLock lock(mutex_);
    const auto it = layers_.find(key);
    return it == layers_.end() ? nullptr : it->second;
  };
  if (const dispatch::Layer* layer = known()) return layer;
  const MutexLock one(registering_);
  if (const dispatch::Layer* layer = known()) return layer;
  KVASIR_ASSIGN(const dispatch::Layer* layer, register_layer(ffn));
  const MutexLock lock(mutex_);
  layers_[key] = layer;
  return layer;
}

Result<const dispatch::Layer*> Runtime::register_layer(const ExpertFfn& ffn) {
  KVASIR_ASSIGN(dispatch::Dispatcher * dispatcher, this->dispatcher());
  KVASIR_ASSIGN(const wire::LayerId id, layer_id_of(ffn, config_.replica));
  if (follower_) follower_->add_layer(id);
  const std::uint64_t expert_bytes = bytes_per_expert(ffn);
  if (!config_.upload) return &dispatcher->register_layer(id, ffn.layer, ffn.recipe, expert_bytes);
  Result<LayerUpload> upload = LayerUpload::make(ffn, id);
  if (!upload) {
    note_unknown(upload.error().message);
    return &dispatcher->register_layer(id, ffn.layer, ffn.recipe, expert_bytes);
  }
  // Where workers have slices of this layer, uploads fill the gaps.
  if (dispatcher->any_holds(id, ffn.recipe.group)) upload->set_id(id);
  const dispatch::Layer& layer = dispatcher->register_layer(upload->id(), ffn.layer, ffn.recipe, expert_bytes);
  dispatcher->upload_missing(layer, upload->slices());
  return &layer;
}

void Runtime::forget(const void* begin, std::size_t bytes) {
  const auto* first = static_cast<const std::byte*>(begin);
  const MutexLock lock(mutex_);
  layers_.erase(layers_.lower_bound(first), layers_.lower_bound(first + bytes));
}

void Runtime::note_unknown(const std::string& text) {
  {
    const MutexLock lock(mutex_);
    if (unknown_.size() >= kUnknownMax || !unknown_.insert(text).second) return;
  }
  log_line(std::format("computing an expert layer on this machine: its shape is not known ({}).", text));
}

std::string Runtime::metrics_text() {
  const dispatch::Dispatcher* dispatcher = made_;
  return plugin::metrics_text(dispatcher ? dispatcher->stats() : dispatch::Stats{}, local_splits_.load(std::memory_order_relaxed));
}

std::string Runtime::stats_json() {
  const dispatch::Dispatcher* dispatcher = made_;
  const dispatch::Stats s = dispatcher ? dispatcher->stats() : dispatch::Stats{};
  nlohmann::ordered_json json = counters_json(s);
  json["rounds_overlapped"] = rounds_overlapped_.load(std::memory_order_relaxed);
  json["splits_local"] = local_splits_.load(std::memory_order_relaxed);
  json["workers"] = dispatcher ? workers_json(*dispatcher) : nlohmann::ordered_json::array();
  json["layers"] = dispatcher ? layers_json(*dispatcher) : nlohmann::ordered_json::array();
  const MutexLock lock(mutex_);
  json["unknown_shapes"] = unknown_;
  return json.dump();
}

}  // namespace kvasir::plugin
