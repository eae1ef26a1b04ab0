// One text over HTTP/1.0, for a scraper: `GET /metrics` is answered with what `text` gives,
// anything else with a short refusal. One connection at a time, each within a few seconds; on
// a thread of its own.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "net/connect.h"

namespace kvasir::net {

class TextServer {
 public:
  // `text` is called on the server's thread and must not throw.
  static Result<std::unique_ptr<TextServer>> start(const HostPort& where, std::string content_type,
                                                   std::function<std::string()> text);
  ~TextServer();

  std::uint16_t port() const { return listener_.port; }

 private:
  TextServer(Listener listener, std::string content_type, std::function<std::string()> text);
  void run();
  void answer(int fd) const;

  Listener listener_;
  const std::string content_type_;
  const std::function<std::string()> text_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace kvasir::net
