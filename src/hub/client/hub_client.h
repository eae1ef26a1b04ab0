// A node's or backbone's calls to its hub, over libcurl. One object per thread.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/error.h"

namespace kvasir::hub {

struct HubAddress {
  std::string url;      // "https://hub.example", without a path
  std::string token;    // never logged
  std::string ca_file;  // PEM, for a hub whose certificate no system authority signed
};

// Refuses a URL that would send the token in the clear over a network.
Result<HubAddress> check_address(HubAddress address);

// For a part of a URL.
std::string percent_encode(std::string_view text);

struct HubReply {
  long status = 0;
  std::string body;
  std::optional<Nanos> retry_after;
  std::string local_ip;  // of this machine, as it reached the hub
  // The body as JSON; an empty object where it is none.
  nlohmann::json json() const;
  // The hub's sentence, or what stands for it.
  std::string error() const;
};

class HubClient {
 public:
  static Result<std::unique_ptr<HubClient>> create(const HubAddress& address);
  virtual ~HubClient() = default;

  // kRetryLater: the hub could not be reached or did not answer in time.
  virtual Result<HubReply> get(const std::string& path) = 0;
  // From any thread: the call under way ends at once, and so does every later one.
  virtual void cancel() = 0;
  virtual Result<HubReply> post(const std::string& path, const nlohmann::json& body) = 0;

  struct Piece {
    long status = 0;       // 200: from the start; 206: from where it was asked
    std::string etag;
    std::uint64_t total = 0;  // of the whole file
    bool complete = false;    // the transfer came to its end
    std::string error;        // the hub's sentence, for other statuses
    std::optional<Nanos> retry_after;
  };
  // Asks for the file from `from` on, if its tag is still `etag`. `begin` is called before the
  // first byte with the status and total; `data` with the bytes. Either gives false to stop.
  virtual Result<Piece> download(const std::string& path, std::uint64_t from, const std::string& etag,
                                 std::uint64_t bytes_per_s_max, const std::function<bool(const Piece&)>& begin,
                                 const std::function<bool(const char*, std::size_t)>& data) = 0;

  // Reads an answer without an end (server-sent events) until the hub ends it, `data` gives
  // false, nothing has come for a minute, or the client is cancelled.
  virtual Result<Piece> stream(const std::string& path, const std::function<bool(const char*, std::size_t)>& data) = 0;
};

}  // namespace kvasir::hub
