#include "hub/http/view_feed.h"

#include <vector>

#include "hub/http/hub.h"
#include "hub/http/view_channel.h"

namespace kvasir::hub {

ViewFeed::ViewFeed(Hub& hub) : hub_(hub), thread_([this] { run(); }) {}

ViewFeed::~ViewFeed() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

std::shared_ptr<EventStream> ViewFeed::follow(const std::string& model, bool with_addresses) {
  if (followers_->fetch_add(1) >= kFollowersMax) {
    --*followers_;
    return nullptr;
  }
  std::shared_ptr<Channel> channel;
  std::shared_ptr<Follower> follower;
  {
    const MutexLock lock(mutex_);
    std::shared_ptr<Channel>& known = channels_[model];
    if (known == nullptr) known = std::make_shared<Channel>(model);
    channel = known;
    follower = std::make_shared<Follower>(channel, with_addresses, followers_);
    channel->add(follower);  // before the thread can find the channel without anyone
  }
  channel->refresh(hub_);
  wake_.notify_all();
  return follower;
}

void ViewFeed::run() {
  MutexLock lock(mutex_);
  while (!stopping_) {
    wake_.wait(lock, [this]() KVASIR_REQUIRES(mutex_) { return stopping_ || !channels_.empty(); });
    std::vector<std::shared_ptr<Channel>> channels;
    std::erase_if(channels_, [](const auto& entry) { return !entry.second->has_followers(); });
    for (const auto& [name, channel] : channels_) channels.push_back(channel);
    lock.unlock();
    for (const auto& channel : channels) channel->refresh(hub_);
    lock.lock();
    wake_.wait_for(lock, kViewInterval, [this]() KVASIR_REQUIRES(mutex_) { return stopping_; });
  }
}

}  // namespace kvasir::hub
