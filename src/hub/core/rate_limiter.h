// Token buckets by key (an address, a token id), bounded in number.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/clock.h"

namespace kvasir::hub {

struct Rate {
  double per_s = 0;  // sustained
  double burst = 0;  // at once, after a pause
};

class RateLimiter {
 public:
  explicit RateLimiter(Rate rate, std::size_t keys_max = 65'536) : rate_(rate), keys_max_(keys_max) {}

  // Takes `cost` from the key's bucket, or says how long to wait until that would work. A new
  // key that finds the table full takes the place of the one that was quiet for longest.
  Nanos take(std::string_view key, TimePoint now, double cost = 1) {
    auto found = index_.find(std::string(key));
    if (found == index_.end()) {
      if (buckets_.size() >= keys_max_) {
        index_.erase(buckets_.front().key);
        buckets_.pop_front();
      }
      buckets_.push_back({std::string(key), rate_.burst, now});
      found = index_.emplace(std::string(key), std::prev(buckets_.end())).first;
    } else {
      buckets_.splice(buckets_.end(), buckets_, found->second);
    }
    Bucket& bucket = *found->second;
    const double passed_s = std::max(0.0, std::chrono::duration<double>(now - bucket.filled).count());
    bucket.level = std::min(rate_.burst, bucket.level + passed_s * rate_.per_s);
    bucket.filled = now;
    if (bucket.level >= cost) {
      bucket.level -= cost;
      return Nanos::zero();
    }
    return std::chrono::duration_cast<Nanos>(std::chrono::duration<double>((cost - bucket.level) / rate_.per_s));
  }

  std::size_t size() const { return buckets_.size(); }

 private:
  struct Bucket {
    std::string key;
    double level = 0;
    TimePoint filled{};
  };
  Rate rate_;
  std::size_t keys_max_;
  std::list<Bucket> buckets_;  // quiet for longest first
  std::unordered_map<std::string, std::list<Bucket>::iterator> index_;
};

}  // namespace kvasir::hub
