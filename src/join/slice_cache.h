// Slices that were fetched, on disk: whole ones named by their content, a begun one beside
// them, and a quota for all together.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <set>
#include <string>

#include "base/error.h"
#include "hub/core/segments.h"
#include "hub/client/hub_client.h"

namespace kvasir::join {

struct FetchOptions {
  std::uint64_t quota_bytes = 0;      // of the folder; 0: no limit
  std::uint64_t daily_bytes_max = 0;  // received over the network in a day (UTC); 0: no limit
  std::uint64_t bytes_per_s_max = 0;
  std::function<void(std::uint64_t done, std::uint64_t total)> progress;
  std::function<void(const std::string&)> log;
  // Waits, false if the node is to stop; asked between attempts and while bytes come (zero time).
  std::function<bool(Nanos)> wait;
};

class SliceCache {
 public:
  static Result<SliceCache> open(std::filesystem::path folder);

  // The file of these experts of one layer: from the cache if the hub still has the same, else
  // fetched, in pieces if need be, however often the line or the hub breaks off; each slab is
  // compared with its hash. kFixInput: the hub refuses, or the quota does.
  Result<std::filesystem::path> fetch(hub::HubClient& hub, const std::string& model, const hub::Segment& experts,
                                      const FetchOptions& options);

  // Files that may not be thrown away to make room.
  void set_in_use(std::set<std::filesystem::path> files) { in_use_ = std::move(files); }

 private:
  explicit SliceCache(std::filesystem::path folder) : folder_(std::move(folder)) {}
  Status make_room(std::uint64_t bytes, std::uint64_t quota, const std::filesystem::path& part) const;
  std::uint64_t received_today() const;
  void count_received(std::uint64_t bytes);

  std::filesystem::path folder_;
  std::set<std::filesystem::path> in_use_;
  std::uint64_t uncounted_ = 0;  // received, not yet written down
};

// Compares every slab with the hash that the slice's header has for it.
Status verify_slice(const std::string& path);

}  // namespace kvasir::join
