// One model's part of the view feed: its state as JSON texts, each with the version at which
// it changed, and the events between two versions.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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
  void put(Text& text, std::string json);
  std::string compose(std::uint64_t from, bool with_addresses) const;

  const std::string model_;  // as asked for; may be empty
  std::mutex refreshing_;
  // Touched while refreshing only:
  std::string shown_model_;
  std::vector<std::vector<Run>> runs_;

  std::mutex mutex_;  // of what follows
  std::uint64_t version_ = 0;
  Text hello_, workers_, workers_with_addresses_, traffic_, latency_;
  std::vector<Text> layers_;
  struct SampleText {
    std::uint64_t number = 0, version = 0;
    std::string json;
  };
  std::deque<SampleText> samples_;
  std::map<std::pair<std::uint64_t, bool>, std::shared_ptr<const std::string>> composed_;
  std::vector<std::weak_ptr<Follower>> followers_;
};

class ViewFeed::Follower final : public EventStream {
 public:
  Follower(std::shared_ptr<Channel> channel, bool with_addresses, std::shared_ptr<std::atomic<std::size_t>> count)
      : channel_(std::move(channel)), with_addresses_(with_addresses), count_(std::move(count)) {}
  ~Follower() override { --*count_; }

  std::shared_ptr<const std::string> next() override { return channel_->events(from_, with_addresses_); }
  void on_more(std::function<void()> wake) override {
    const std::lock_guard lock(mutex_);
    wake_ = std::move(wake);
  }
  void wake() {
    const std::lock_guard lock(mutex_);
    if (wake_) wake_();
  }

 private:
  const std::shared_ptr<Channel> channel_;
  const bool with_addresses_;
  const std::shared_ptr<std::atomic<std::size_t>> count_;
  std::uint64_t from_ = 0;
  std::mutex mutex_;
  std::function<void()> wake_;
};

}  // namespace kvasir::hub
