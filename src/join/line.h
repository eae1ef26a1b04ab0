// A node's open line to the hub: it says nothing, and its end tells the hub at once that the
// node is gone. Where it ends for another reason (the network, a proxy, a restart), the node
// says that it lives and opens another one.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "hub/client/hub_client.h"

namespace kvasir::join {

class Line {
 public:
  // `ended` is called from the line's thread each time an open line has ended.
  static Result<std::unique_ptr<Line>> open(const hub::HubAddress& address, const std::string& worker_id,
                                            std::function<void()> ended);
  ~Line();

 private:
  Line(std::unique_ptr<hub::HubClient> client, std::string path, std::function<void()> ended);
  void run();

  const std::unique_ptr<hub::HubClient> client_;
  const std::string path_;
  const std::function<void()> ended_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace kvasir::join
