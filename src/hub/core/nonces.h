// Nonces that were given out and may come back once, within their time.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/clock.h"

namespace kvasir::hub {

class Nonces {
 public:
  explicit Nonces(Nanos ttl, std::size_t count_max = 65'536) : ttl_(ttl), count_max_(count_max) {}

  Nanos ttl() const { return ttl_; }

  // `subject` is what the nonce was given for; the oldest make room when there are too many.
  void issue(std::string nonce, std::string subject, TimePoint now) {
    drop_old(now);
    while (order_.size() >= count_max_) drop_front();
    order_.push_back({nonce, now + ttl_});
    subjects_[std::move(nonce)] = std::move(subject);
  }

  // Whether it was given for `subject` and is still good; gone afterwards in either case.
  bool redeem(std::string_view nonce, std::string_view subject, TimePoint now) {
    drop_old(now);
    const auto found = subjects_.find(std::string(nonce));
    if (found == subjects_.end()) return false;
    const bool good = found->second == subject;
    subjects_.erase(found);
    return good;
  }

 private:
  struct Issued {
    std::string nonce;
    TimePoint expires;
  };
  void drop_front() {
    subjects_.erase(order_.front().nonce);
    order_.pop_front();
  }
  void drop_old(TimePoint now) {
    while (!order_.empty() && order_.front().expires <= now) drop_front();
  }

  Nanos ttl_;
  std::size_t count_max_;
  std::deque<Issued> order_;
  std::unordered_map<std::string, std::string> subjects_;
};

}  // namespace kvasir::hub
