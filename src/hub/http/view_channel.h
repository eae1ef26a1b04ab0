// One model's part of the view feed: its state as JSON texts, each with the version at which
// it changed, and the events between two versions.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "hub/core/coverage_grid.h"
#include "hub/core/market.h"
#include "hub/core/traffic.h"
#include "hub/http/view_feed.h"

namespace kvasir::hub {

// A word for what a node does: lost, draining, late, moving, fetching, proving or serving.
std::string_view state_of(const NodeView& node, Nanos heartbeat);

class ViewFeed::Channel {
 public:
  explicit Channel(std::string model) : model_(std::move(model)) {}

  // Looks at the hub; wakes the followers if anything is new.
  void refresh(Hub& hub);
  void add(const std::shared_ptr<Follower>& follower);
  bool has_followers();

  // The events after version `from` (0: everything), which becomes the current one; null: none.
  std::shared_ptr<const std::string> events(std::uint64_t& from, bool with_addresses);

 private:
  struct Text {
    std::string json;
    std::uint64_t version = 0;
  };
  struct State;  // what one look gave

  State look(Hub& hub);
  void put(Text& text, std::string json) KVASIR_REQUIRES(mutex_);
  std::string compose(std::uint64_t from, bool with_addresses) const KVASIR_REQUIRES(mutex_);

  const std::string model_;  // as asked for; may be empty
  Mutex refreshing_;
  std::string shown_model_ KVASIR_GUARDED_BY(refreshing_);
  std::vector<std::vector<Run>> runs_ KVASIR_GUARDED_BY(refreshing_);

  Mutex mutex_;
  std::uint64_t version_ KVASIR_GUARDED_BY(mutex_) = 0;
  Text hello_ KVASIR_GUARDED_BY(mutex_);
  Text workers_ KVASIR_GUARDED_BY(mutex_);
  Text workers_with_addresses_ KVASIR_GUARDED_BY(mutex_);
  Text traffic_ KVASIR_GUARDED_BY(mutex_);
  Text latency_ KVASIR_GUARDED_BY(mutex_);
  std::vector<Text> layers_ KVASIR_GUARDED_BY(mutex_);
  struct SampleText {
    std::uint64_t number = 0, version = 0;
    std::string json;
  };
  std::deque<SampleText> samples_ KVASIR_GUARDED_BY(mutex_);
  std::map<std::pair<std::uint64_t, bool>, std::shared_ptr<const std::string>> composed_ KVASIR_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<Follower>> followers_ KVASIR_GUARDED_BY(mutex_);
};

class ViewFeed::Follower final : public EventStream {
 public:
  Follower(std::shared_ptr<Channel> channel, bool with_addresses, std::shared_ptr<std::atomic<std::size_t>> count)
      : channel_(std::move(channel)), with_addresses_(with_addresses), count_(std::move(count)) {}
  ~Follower() override { --*count_; }

  std::shared_ptr<const std::string> next() override { return channel_->events(from_, with_addresses_); }
  void on_more(std::function<void()> wake) override {
    const MutexLock lock(mutex_);
    wake_ = std::move(wake);
  }
  void wake() {
    const MutexLock lock(mutex_);
    if (wake_) wake_();
  }

 private:
  const std::shared_ptr<Channel> channel_;
  const bool with_addresses_;
  const std::shared_ptr<std::atomic<std::size_t>> count_;
  std::uint64_t from_ = 0;
  Mutex mutex_;
  std::function<void()> wake_ KVASIR_GUARDED_BY(mutex_);
};

}  // namespace kvasir::hub
